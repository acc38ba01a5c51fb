"""Download compression: clients get the steps that lead from their copy to the server's model (STC, arXiv 1903.02891).

The strategy makes the true model W. All clients share a copy V of it:

    step_t = encode(W_t − V_{t−1})          V_t = V_{t−1} + decode(step_t)

What a step leaves out stays in the difference W_t − V_t and goes out with a later step. This difference is the error
memory of the server, with decay 1, so nothing else has to be kept. A client trains from V_t, but its update has to be
added to W_t, as `update.decode(data, chain.model)` and `DownloadChain.rebased` do: added to V_t, it would undo what has
not been sent yet.
"""

from __future__ import annotations

from collections import deque
from logging import WARNING

import torch
from flwr.supercore import log

from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import Values
from gradwire.catalogue.spec_by_name import Spec, idle_patterns, parse_spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.shared import model_copy, update
from gradwire.flower.shared.update import Tensors

# Parameters of a recipe that are about gradients, or about an error memory, which is not needed here.
_SWITCHED_OFF: Values = {"decay": 0.0, "mask": "off", "ahead": 0.0, "flush": "0", "clip_norm": 0.0}


class DownloadChain:
    """The server's models, numbered from 1, and the steps from each to the next.

    It promises that a client which applies the steps that `steps_since` returns has `shared_copy` bit for bit, and that
    whatever a step leaves out reaches clients by a later one. Each step is encoded once for all clients, and kept for
    those who skip rounds; all steps together are never longer than the model itself. It never changes the tensors that
    it is given, and nobody may change those of `model` and `shared_copy`. It is used in the thread of the server app.
    """

    def __init__(self, spec: Spec):
        self.spec = {pattern: _without_memory(chosen) for pattern, chosen in parse_spec(spec).items()}
        self.number = 0
        self.model: dict[str, torch.Tensor] = {}  # W, as published last
        self.shared_copy: dict[str, torch.Tensor] = {}  # V, which every client with this number has
        self._model_bytes = self._digest = 0
        self._steps: deque[bytes] = deque()  # those that led to the last models
        # The bytes of each copy that a kept step starts from. Dtypes may change on the way, and clients take no message
        # that is as long as its copy.
        self._copy_bytes: deque[int] = deque()
        self._last_answer: tuple[int, bytes | None] = (0, None)  # argument and result of `steps_since`

    def publish(self, model: Tensors) -> int:
        """Take the next model, encode the step to it, and return its number; the same model keeps its number.

        Raises a GradwireError, and leaves everything as it was, if the model holds a NaN.
        """
        same_names = model_copy.names_and_shapes(model) == model_copy.names_and_shapes(self.model)
        if self.number and same_names and all(model_copy.is_same(t, self.model[name]) for name, t in model.items()):
            return self.number
        for name, t in model.items():
            if t.is_floating_point() and t.numel() and torch.isnan(t.max()):
                raise GradwireError(
                    f"the model has diverged: {name!r} holds a NaN. Clients keep the model before it; "
                    "a lower learning rate may help"
                )
        if not self.number:
            for sentence in idle_patterns(parse_spec(self.spec), model):
                log(WARNING, "gradwire: download=: %s", sentence)
        model = model_copy.private_copy(model)
        model_bytes = model_copy.whole_bytes(model)
        step, shared_copy = self._step(model) if self.number and same_names else (None, model)
        if step is None or len(step) >= model_bytes:
            shared_copy = model
            self._steps.clear()
            self._copy_bytes.clear()
        else:
            self._steps.append(step)
            self._copy_bytes.append(model_copy.whole_bytes(self.shared_copy))
        while sum(map(len, self._steps)) > model_bytes:
            self._steps.popleft()
            self._copy_bytes.popleft()
        self.model, self.shared_copy, self._model_bytes = model, shared_copy, model_bytes
        self._digest = model_copy.digest(shared_copy)
        self.number += 1
        self._last_answer = (0, None)
        return self.number

    def steps_since(self, have: int) -> bytes | None:
        """Return the message that brings a client from model number `have` to the present one.

        None means that `shared_copy` has to be sent whole: it is shorter, or the steps are no longer there. Clients
        with the same number get the same object.
        """
        oldest = self.number - len(self._steps)
        if not max(1, oldest) <= have <= self.number:
            return None
        if self._last_answer[0] != have:
            steps = list(self._steps)[have - oldest :]
            data = model_copy.pack_steps(have, self.number, self._digest, steps)
            copy_bytes = [*self._copy_bytes, self._model_bytes][have - oldest]
            most = min(copy_bytes, self._model_bytes)
            self._last_answer = (have, data if len(data) < most else None)
        return self._last_answer[1]

    def rebased(self, trained: Tensors) -> dict[str, torch.Tensor]:
        """Return a whole model that a client trained from `shared_copy`, with W − V added.

        It is then as if it had been trained from the true model.
        """
        result = dict(trained)
        for name, t in trained.items():
            true, copied = self.model.get(name), self.shared_copy.get(name)
            if true is None or copied is None or not t.is_floating_point() or t.shape != true.shape:
                continue  # this tensor was not trained from the model
            if not torch.equal(true, copied):  # the difference of equal infinities would be NaN
                result[name] = (t + _difference(true, copied)).to(t.dtype)
        return result

    def _step(self, model: dict[str, torch.Tensor]) -> tuple[bytes | None, dict[str, torch.Tensor]]:
        """Return the step from `shared_copy` towards the model, and the copy after it.

        The step is None if the model has to go out whole.
        """
        before = self.shared_copy
        changed = {name: t for name, t in model.items() if not model_copy.is_same(t, before[name])}
        # Flower turns integers into floats by averaging: tensors with another dtype than before are sent as values.
        lossy = {
            name: _difference(t, before[name])
            for name, t in changed.items()
            if t.is_floating_point() and t.dtype == before[name].dtype
        }
        try:
            while True:
                exact = {name: t for name, t in changed.items() if name not in lossy}
                data = update.encode(lossy, exact, list(model), self.spec, steps=self.number).data
                after = {**before, **update.decode(data, before, new_dtypes=True)}
                harmed = [name for name, d in lossy.items() if _is_worse_than_none(name, d, after[name], model[name])]
                if not harmed:
                    return data, after
                for name in harmed:
                    del lossy[name]
        except SpecError:
            raise
        except GradwireError:  # an infinity, a sum out of range, a dtype that no frame holds
            return None, model


def _difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the difference, at least in fp32: half precision would round it, or overflow."""
    return new - old if new.dtype == torch.float64 else new.float() - old.float()


def _is_worse_than_none(name: str, difference: torch.Tensor, after: torch.Tensor, goal: torch.Tensor) -> bool:
    """Whether a lossy step harms a tensor: it leads farther away from the goal, or makes a variance negative.

    A variance that falls from 1.5 to 0.0001 is below zero after a step that is wrong by 0.1%.
    """
    if update.is_variance(name) and bool((after < 0).any()) and not bool((goal < 0).any()):
        return True
    return bool(_difference(goal, after).norm() > difference.norm())


def _without_memory(chosen: Recipe) -> str:
    """Return the spec of the recipe as it is used here, with its own error memory switched off.

    Raises a SpecError for a recipe that cannot have an error memory.
    """
    parameters = chosen.entry.parameters
    if "decay" not in parameters:
        return chosen.spec
    try:
        recipe(chosen.entry.spell({**chosen.values, "decay": 1.0}))
    except SpecError as error:
        raise SpecError(
            f"{chosen.name} is not for downloads, where what is left out of one step goes out with the next, as with "
            f"decay=1: {error}. Use one that takes an error memory, such as stc, topk, co3 or ecq"
        ) from None
    if chosen.sums:
        return chosen.spec  # it needs a decay; its memory stays unused
    return chosen.entry.spell(
        {**chosen.values, **{key: value for key, value in _SWITCHED_OFF.items() if key in parameters}}
    )
