"""The order in which DDP's buckets have the entries of a parameter: that of its memory, not that of its dimensions.

A parameter in `channels_last`, or a transposed one, lies in memory in another order than its shape says, and DDP lays
its gradient into the bucket in that order. Gradients are exchanged as they lie there, without a copy. What is kept
of them (error memory, velocity) has the same order while the training runs, and is saved in the order of the
parameter's dimensions, so that a checkpoint means the same for every memory format and every wrapper.

Codecs that use the shape (`by_rows`) need that of the parameter: a kernel in `channels_last` is a kernel no more. What
they code is exchanged, and kept, in the order of the dimensions; the exchange copies it to and from the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.correct.complex_pairs import as_reals

SAVED = ("memory", "velocity", "shards")  # what a state has by parameter name, entry for entry


class BucketOrder:
    """The dimensions of each parameter in the order of its memory, where that is another than the usual one.

    The training's thread calls everything.
    """

    def __init__(self) -> None:
        self._dimensions: dict[str, Sequence[int]] = {}  # of those that are exchanged as they lie in memory
        self._in_memory: dict[str, Sequence[int]] = {}  # of all

    def learn(self, name: str, parameter: torch.Tensor, by_rows: bool = False) -> Sequence[int] | None:
        """Take note of how a parameter lies in memory now, and return the order of before if another counts now.

        With `by_rows` that is the order of its dimensions, however it lies.
        """
        before = self._dimensions.pop(name, range(parameter.dim()))
        self._in_memory.pop(name, None)
        order = dimensions_by_stride(parameter)
        if order is not None:
            self._in_memory[name] = order
            if by_rows:
                order = None
            else:
                self._dimensions[name] = order
        return before if list(before) != list(order or range(parameter.dim())) else None

    def in_bucket(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a view of a gradient of a bucket, which torch gives the parameter's shape, as it really lies there.

        If the order of dimensions counts, the view has the parameter's shape, and is not contiguous.
        """
        order = self._in_memory.get(name)
        if order is None:
            return gradient
        lies = gradient.view([gradient.shape[d] for d in (*order, *range(len(order), gradient.dim()))])
        return lies if name in self._dimensions else _with_own_dimensions(lies, order)

    def arranged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a parameter's shape with real entries in the bucket's order: a view if it lies so."""
        tensor = as_reals(tensor)
        order = self._dimensions.get(name)
        return tensor if order is None else tensor.permute(*order, *range(len(order), tensor.dim()))

    def of_saved_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of this worker as it is saved."""
        own = self._dimensions
        return self._mapped(state, lambda name, tensor: _with_own_dimensions(tensor, own[name]).contiguous())

    def of_loaded_memory(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a saved memory of a parameter as this worker goes on from it."""
        return self.arranged(name, tensor).contiguous() if self._fits(name, tensor) else tensor

    def own_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the shape in the order of the parameter's dimensions, of one in the bucket's order."""
        order = self._dimensions.get(name)
        if order is None:
            return shape
        inverse = sorted(range(len(order)), key=lambda d: order[d])
        return torch.Size((*(shape[d] for d in inverse), *shape[len(order) :]))

    def moved(self, name: str, tensor: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
        """Return a tensor that had another order `before` in the present one."""
        return self.arranged(name, _with_own_dimensions(tensor, before)).contiguous()

    def _mapped(self, state: dict[str, Any], change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        if not self._dimensions or not isinstance(state, dict):
            return state
        result = dict(state)
        for key in SAVED:
            tensors = state.get(key)
            if isinstance(tensors, dict):
                result[key] = {n: change(n, t) if self._fits(n, t) else t for n, t in tensors.items()}
        return result

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor may be one of this parameter, with pairs of reals maybe: other ones are refused."""
        order = self._dimensions.get(name)
        return order is not None and tensor.dim() in (len(order), len(order) + 1)


def _with_own_dimensions(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a view of a tensor whose dimensions have this order, with the dimensions of its parameter."""
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return tensor.permute(*inverse, *range(len(order), tensor.dim()))


def dimensions_by_stride(tensor: torch.Tensor) -> Sequence[int] | None:
    """Return the dimensions in the order in which memory has them; None if that is their own.

    It is also None if the entries have gaps between them or overlap: then DDP lays them out in the usual order.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    return order if tensor.permute(order).is_contiguous() else None
