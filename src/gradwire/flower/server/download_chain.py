"""Download compression: clients are sent what they missed of the server's model (STC, arXiv 1903.02891).

The server has the true model W, which the strategy made. All clients share a copy V of it:

    step_t = encode(W_t − V_{t−1})          V_t = V_{t−1} + decode(step_t)

What a step leaves out stays in the difference, and goes out with a later one: W_t − V_t is the server-side residual,
with decay 1, and nothing else has to be kept. This holds as long as training goes on from W: a client trains from V_t,
and what it learned belongs onto W_t, as `update.decode(data, chain.model)` and `Chain.restored` have it. Put onto V_t,
the residual would be lost.

Steps are encoded once for all clients, and cached for those who skipped rounds.
"""

from __future__ import annotations

from collections import deque

import torch

from gradwire.catalogue.all_recipes import recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import Values
from gradwire.catalogue.spec_by_name import Spec, parse_spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.shared import model_copy, update
from gradwire.flower.shared.model_copy import Copy
from gradwire.flower.shared.update import Tensors

__all__ = ["Chain", "Copy"]
# Parts of a recipe that are about gradients, or about a memory that is not needed here.
_WITHOUT: Values = {"decay": 0.0, "mask": "off", "ahead": 0.0, "flush": "0", "clip_norm": 0.0}


class Chain:
    """The server's models, numbered from 1, and the steps from each to the next."""

    def __init__(self, spec: Spec):
        self.spec = {pattern: _without_memory(chosen) for pattern, chosen in parse_spec(update.full_spec(spec)).items()}
        self.number = 0
        self.model: dict[str, torch.Tensor] = {}  # W, as published last
        self.common: dict[str, torch.Tensor] = {}  # V, which every client with this number has; not to be changed
        self._whole = self._digest = 0
        self._steps: deque[bytes] = deque()  # the last ones; in all no longer than the model itself
        self._last: tuple[int, bytes | None] = (0, None)  # answer of `missed`, for the next client with the same model

    def publish(self, model: Tensors) -> int:
        """The number of this model; that of the last one if it is the same still."""
        known = model_copy.layout(model) == model_copy.layout(self.model)
        if self.number and known and all(model_copy.same(t, self.model[name]) for name, t in model.items()):
            return self.number
        for name, t in model.items():
            if t.is_floating_point() and t.numel() and torch.isnan(t.max()):
                raise GradwireError(
                    f"the model has diverged: {name!r} holds a NaN. Clients keep the model before it; "
                    "a lower learning rate may help"
                )
        model = model_copy.own(model)
        whole = model_copy.whole_bytes(model)
        step, common = self._step(model) if self.number and known else (None, model)
        if step is None or len(step) >= whole:
            step, common = None, model
            self._steps.clear()
        else:
            self._steps.append(step)
        while sum(map(len, self._steps)) > whole:
            self._steps.popleft()
        self.model, self.common, self._whole, self._digest = model, common, whole, model_copy.digest(common)
        self.number += 1
        self._last = (0, None)
        return self.number

    def missed(self, have: int) -> bytes | None:
        """What a client with model `have` needs for the present one, as one message; None if `common`, whole, is less,
        or all there is."""
        oldest = self.number - len(self._steps)
        if not max(1, oldest) <= have <= self.number:
            return None
        if self._last[0] != have:
            steps = list(self._steps)[have - oldest :]
            data = model_copy.message(have, self.number, self._digest, steps)
            self._last = (have, data if len(data) < self._whole else None)
        return self._last[1]

    def restored(self, reply: Tensors) -> dict[str, torch.Tensor]:
        """A whole model that a client made of `common`, as if it had been made of the true one."""
        result = dict(reply)
        for name, t in reply.items():
            true, had = self.model.get(name), self.common.get(name)
            if true is None or had is None or not t.is_floating_point() or t.shape != true.shape:
                continue  # whatever it is, it was not made of this model
            if not torch.equal(true, had):  # else nothing waits, and infinities have no difference
                result[name] = (t + _difference(true, had)).to(t.dtype)
        return result

    def _step(self, model: dict[str, torch.Tensor]) -> tuple[bytes | None, dict[str, torch.Tensor]]:
        """From `common` towards the model, and where it leads; no step where the model has to go out whole."""
        changed = {name: t for name, t in model.items() if not model_copy.same(t, self.common[name])}
        # Means of integers are floats in Flower: what has another dtype than before goes out as it is.
        lossy = {
            name: _difference(t, self.common[name])
            for name, t in changed.items()
            if t.is_floating_point() and t.dtype == self.common[name].dtype
        }
        try:
            while True:
                exact = {name: t for name, t in changed.items() if name not in lossy}
                data = update.encode(lossy, exact, list(model), self.spec, steps=self.number).data
                common = {**self.common, **update.decode(data, self.common, new_dtypes=True)}
                unfit = [name for name, d in lossy.items() if _leads_astray(name, d, common[name], model[name])]
                if not unfit:
                    return data, common
                for name in unfit:
                    del lossy[name]
        except SpecError:
            raise
        except GradwireError:  # an infinity, a sum out of range, a dtype that no frame holds
            return None, model


def _difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """At least in fp32: half precision would round it, or overflow."""
    return new - old if new.dtype == torch.float64 else new.float() - old.float()


def _leads_astray(name: str, before: torch.Tensor, reached: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a step is worse than none: the residual must not grow, and a variance that falls from 1.5 to 0.0001 is
    below zero after a step that is wrong by 0.1%."""
    if update.is_variance(name) and bool((reached < 0).any()) and not bool((wanted < 0).any()):
        return True
    return bool(_difference(wanted, reached).norm() > before.norm())


def _without_memory(chosen: Recipe) -> str:
    """The spec of the recipe as it is used here. One that has to do without an error memory is refused."""
    own = chosen.entry.parameters
    if "decay" not in own:
        return chosen.spec
    try:
        recipe(chosen.entry.spell({**chosen.values, "decay": 1.0}))
    except SpecError as error:
        raise SpecError(
            f"{chosen.name} is not for downloads, where what is left out of one step goes out with the next, as with "
            f"decay=1: {error}. Use one that takes an error memory, such as stc, topk, co3 or ecq"
        ) from None
    if chosen.sums:
        return chosen.spec  # asks for a decay; its memory is left unused
    return chosen.entry.spell({**chosen.values, **{key: value for key, value in _WITHOUT.items() if key in own}})
