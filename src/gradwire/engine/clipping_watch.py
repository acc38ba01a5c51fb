"""Notices gradients that are clipped after the backward pass under recipes that have taken over the momentum.

What such a recipe leaves in `.grad` is no gradient: it is the part of all ranks' velocities that was sent in this step,
many times as long as a gradient. `clip_grad_norm_` would cut that down, and what it cuts off is lost, since the ranks'
memories count it as sent. The recipe's own `clip_norm` cuts gradients before they are added to the velocity.

A factor that is the same in all steps does no harm: it commutes with momentum and memory. So two factors that differ
tell that something else was done, and powers of two are left out, which a GradScaler divides by.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping

import torch

from gradwire.correct.complex_pairs import as_reals

TENSORS = 8  # the smallest ones: a factor of all gradients shows in each of them
ALIKE = 0.02  # of log₂ of two factors: more than bf16 rounds


class ClippingWatch:
    """Compares the largest entry of some small gradients after the exchange with that before the optimizer's step.

    The training's thread calls everything. On a GPU, where a look means to wait for it, only steps 1, 2, 4, 8, … are
    looked at.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], recipe: str):
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        smallest = sorted(held, key=lambda p: p.numel())[:TENSORS]
        self._parameters = {names[id(p)]: p for p in smallest}
        self._recipe = recipe
        self._steps = 0
        self._means: dict[str, torch.Tensor] = {}
        self._largest = 0.0  # entry of these means; 0 if the step is not looked at
        self._last_factor: float | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def submitted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take note of tensors that will hold means at the end of the step."""
        self._means.update((name, tensor) for name, tensor in tensors if name in self._parameters)

    def step_done(self) -> None:
        """Look at the means, which DDP copies to `.grad` next."""
        self._steps += 1
        means, self._means = self._means, {}
        is_due = self._steps & (self._steps - 1) == 0 or not any(mean.is_cuda for mean in means.values())
        self._largest = _largest_entry(means.values()) if is_due else 0.0

    def _before_step(self) -> None:
        before, self._largest = self._largest, 0.0
        if not before or not math.isfinite(before):
            return
        after = _largest_entry(as_reals(p.grad) for p in self._parameters.values() if p.grad is not None)
        if not after or not math.isfinite(after):
            return
        factor = math.log2(after / before)
        last, self._last_factor = self._last_factor, factor
        if last is not None and abs(factor - last - round(factor - last)) > ALIKE:
            self.end()
            warnings.warn(
                f"gradients were changed between backward and optimizer.step, as clip_grad_norm_ does. With "
                f"{self._recipe} they are velocities by then, far longer than gradients, and what is cut off is lost: "
                f"leave that line out, and clip in the recipe, as '{self._recipe}:clip_norm=1' does (docs/sparse.md)",
                stacklevel=2,
            )

    def end(self) -> None:
        """Stop looking."""
        self._hook.remove()
        self._parameters = {}


def _largest_entry(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest magnitude in these tensors; 0 if there are none."""
    return max((float(tensor.detach().abs().max()) for tensor in tensors), default=0.0)
