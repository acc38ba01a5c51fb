"""What is learned from the steps of a training: which recipe is fastest here (`auto`), and which aggregation."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping, Sequence

from gradwire.aggregate.exchanges.gradient_exchange import ALL_GATHER, ALL_REDUCE, SCATTER_REDUCE, GradientExchange
from gradwire.aggregate.transport.link import Link
from gradwire.engine import auto
from gradwire.engine.auto import Auto
from gradwire.engine.cost_model import Load, Speed, all_reduce_s, structure_may_pay

_log = logging.getLogger(__name__)
STEPS_TO_LEARN = 3  # from which the cost model takes its figures
ADVICE = '; under Adam the recipe "adam" may have less loss for fewer bytes (docs/language-models.md)'
CLEARLY = 0.9  # scatter-reduce compresses twice, so it has to be that much faster


class Tuner:
    """Chooses recipe and aggregation from what the steps took, on all ranks alike.

    `target` is the error that `auto` may make, or None where the user has chosen the recipe. The aggregation is chosen
    only with `open_aggregate`; where it is open and the recipe sends everything as it is, all-reduce does that best.
    `under_adam` says whether the optimizer was given and is an Adam. The training's thread calls it between steps; all
    ranks decide in the same steps.
    """

    def __init__(
        self, link: Link, exchange: GradientExchange, target: float | None, open_aggregate: bool, under_adam: bool
    ):
        self.link, self.exchange = link, exchange
        self._recipes, self._ledger = exchange.coder.recipes, exchange.coder.ledger
        alone = link.world == 1
        # Hosts that share memories all-reduce in their own way.
        self._sends_as_is = open_aggregate and exchange.host is None and self._recipes.send_as_is
        self._open_aggregate = open_aggregate and exchange.link.world > 2 and not self._sends_as_is
        measures = (target is not None and not alone) or self._open_aggregate
        self._speed = Speed.measure(link) if measures and target is None else None  # else `_candidates` measures it
        self._under_adam = measures and self._largest([float(under_adam)]) == [1.0]  # on any rank: all try the same
        self.auto = (
            None if target is None else Auto(self._largest, self._plain_seconds, target, self._candidates, alone)
        )
        self._aggregate = exchange.aggregate  # what every recipe begins with
        self._ended = 0.0  # when the last step did
        self._since: dict[str, float] = {"steps": self._ledger.steps}  # figures when the recipe was last changed
        if self.plain:
            self.use(auto.EXACT)
            if self.auto is not None:
                _log.info("auto: plain all-reduce, without a trial, since there is only one rank")

    @property
    def plain(self) -> bool:
        """Whether steps are plain all-reduces: the recipe sends everything as it is, or `auto` has found, or is trying,
        that nothing beats them."""
        return self._sends_as_is if self.auto is None else self.auto.spec in auto.PLAIN

    @property
    def halves(self) -> bool:
        """Whether a plain step sends fp32 gradients in bf16."""
        return self.auto is not None and self.auto.spec == auto.HALF

    @property
    def rivals(self) -> Sequence[str]:
        """The specs whose errors are to be measured in the next step."""
        if self.auto is None or not self.auto.measuring:
            return ()
        return [auto.MEASURED_BY.get(spec, spec) for spec in self.auto.tried if spec != auto.EXACT]

    def step_done(self, rival_errors: Mapping[str, float]) -> None:
        """Learn from a step that is over, and from the relative errors of the rivals if they were measured."""
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        if self._open_aggregate and self._ledger.steps - self._since["steps"] == STEPS_TO_LEARN:
            self._choose_aggregate()
        if self.auto is not None and seconds < now:  # not the first, before which there was none
            before, was_settled = self.auto.spec, self.auto.settled
            self.auto.step_done(seconds, rival_errors)
            tries_again = was_settled and not self.auto.settled  # the aggregation is chosen anew, too
            if self.auto.spec != before or tries_again:
                self.use(self.auto.spec)
            if self.auto.settled and not was_settled and self.link.rank == 0:
                _log.info("auto: %s%s", self.auto.reason, ADVICE if self._under_adam and not self.plain else "")

    def _candidates(self) -> Sequence[str]:
        """Return the specs to try on the link as it is now."""
        self.exchange.settle()
        self._speed = Speed.measure(self.link)
        structured = structure_may_pay(self._speed, self.exchange.link.world)
        # Hosts that share memories all-reduce in their own way.
        return auto.candidates(self.exchange.host is None, structured, self._under_adam)

    def loaded(self) -> None:
        """Take note that the number of steps has changed, by a checkpoint."""
        self._since["steps"] = self._ledger.steps

    def use(self, spec: str) -> None:
        """Use another recipe from the next step on; error memories stay, and are sent with it."""
        if spec not in auto.PLAIN:
            self._recipes.use(spec)
        self.exchange.use(ALL_REDUCE if spec in auto.PLAIN else self._aggregate)
        self._since = {"steps": self._ledger.steps, **self._ledger.stats()}

    def _choose_aggregate(self) -> None:
        """Choose by the cost model, from what the first steps took on the slowest rank."""
        exchange, world = self.exchange, self.exchange.link.world
        if exchange.aggregate != ALL_GATHER:
            return
        assert self._speed is not None
        exchange.settle()
        since = {key: value - self._since.get(key, 0) for key, value in self._ledger.stats().items()}
        figures = [since["frame_bytes"], exchange.messages, since["encode_s"], since["decode_s"] / world]
        load = Load(*self._largest([value / STEPS_TO_LEARN for value in figures]))
        if load.scatter_reduce_s(self._speed, world) < CLEARLY * load.all_gather_s(self._speed, world):
            exchange.use(SCATTER_REDUCE)

    def _largest(self, values: list[float]) -> list[float]:
        """Return the largest of all ranks, one by one."""
        packed = struct.Struct(f"<{len(values)}d")
        of_ranks = [packed.unpack(other) for other in self.link.gather_short(packed.pack(*values))]
        return [max(column) for column in zip(*of_ranks, strict=True)]

    def _plain_seconds(self, entry_bytes: int) -> float:
        assert self._speed is not None
        return all_reduce_s(entry_bytes * self._recipes.total, self._speed, self.exchange.world)
