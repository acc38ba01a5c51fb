"""`Handle`: what users have in hand while gradients are averaged."""

from __future__ import annotations

from typing import Any

from gradwire.checkpoints.rank_states import AllRanks, own_part, refuse_pickling
from gradwire.engine.gradients import Gradients
from gradwire.engine.log import Monitor


class Handle:
    """The compressed exchange of one model: its figures, its error memory, and what is in use.

    `gradwire.ddp.attach` returns one, and `gradwire.DataParallel` has one as `model.gradwire`. Call it from the thread
    that trains, between two steps.
    """

    def __init__(self, gradients: Gradients):
        self.gradients = gradients

    def __repr__(self) -> str:
        """Return what is in use, as it would be typed."""
        return f"<gradwire: {self.recipe}, aggregate={self.aggregate}>"

    @property
    def recipe(self) -> str:
        """The spec in use, of one name or by patterns; with `auto` its choice, such as "exact" for plain all-reduce."""
        auto = self.gradients.tuner.auto
        return str(self.gradients.recipes) if auto is None else auto.spec

    @property
    def aggregate(self) -> str:
        """How frames meet; "sum" where they are added up on their way, "all_reduce" where there are none."""
        return "sum" if self.gradients.recipes.sums_all else self.gradients.exchange.aggregate

    def log_to(self, to: Any, every: int = 100, layers: bool = False) -> None:
        """Write figures after every `every` steps, to a TensorBoard SummaryWriter or a function of (figures, step).

        They are bytes and seconds a step, the ratio, and the relative squared error (nmse) of the last step, which
        takes a little time to measure; with `layers`, also error and bytes of each parameter.
        """
        self.gradients.log_to(Monitor(to, every, layers))

    def detach(self) -> None:
        """Stop compressing, on all ranks; figures and memories can still be read."""
        self.gradients.disconnect()

    def stats(self) -> dict[str, float]:
        """Return the totals of this rank since it was attached or loaded; `ratio` is fp32 bytes over frame bytes."""
        return self.gradients.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error memory, by parameter name."""
        return self.gradients.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` of this rank was, or `all_ranks.state_dict()`, of any number of workers.

        A state that does not fit, because it is damaged or of other recipes, is a CheckpointError and changes nothing.
        """
        self.gradients.load_state_dict(own_part(state, self.gradients.given_group))

    @property
    def all_ranks(self) -> AllRanks:
        """The state of all ranks at once, for checkpoints that rank 0 writes."""
        return AllRanks(self, self.gradients.given_group, self.gradients.together)

    def __reduce__(self) -> Any:
        refuse_pickling("a handle")
