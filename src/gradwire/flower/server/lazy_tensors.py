"""Tensors of updates that the server decodes when its strategy asks for them, and how large their entries may be."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable

import numpy as np
import torch

from gradwire import codecs, kernels
from gradwire.errors import FrameError
from gradwire.flower.server.update_norm import DeferredChange, norm
from gradwire.flower.shared.update import largest_magnitude
from gradwire.frame import headers

# Whatever is larger has diverged, and its square, which adaptive strategies compute, would overflow.
LARGEST_MAGNITUDE = 2.0**60
MakeTensor = Callable[[], torch.Tensor]


class LazyTensors:
    """The large tensors of updates to one model, decoded whenever somebody asks for them.

    If a server decoded them on arrival, the models of a hundred clients would be gigabytes of new memory in every
    round. For the same reason a decoded tensor that nobody refers to any more lends its memory to the next one of the
    same name.

    When `add` returns, it is certain that the tensor will be finite: either the side information of the frame bounds
    its entries, or the frame is decoded once to see. In the former case it is not yet known whether the symbols can be
    decoded, so calling the function in `makers` raises a FrameError if the frame was forged.

    It fulfils `update.DeferredDecoding`. The thread of the server app is the only one that may use it.
    """

    def __init__(self) -> None:
        self.makers: dict[str, MakeTensor] = {}  # by name, of the update that was read last
        self.changes: dict[str, DeferredChange] = {}  # likewise
        self._largest_before: dict[str, float] = {}  # the largest magnitude of each tensor of the model
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        # The memory that each tensor was last decoded to, and the array by which it was lent.
        self._lent: dict[str, tuple[np.ndarray, weakref.ref[np.ndarray]]] = {}

    def start_update(self) -> None:
        """Forget the tensors of the update before. Functions that were taken from `makers` stay valid."""
        self.makers, self.changes = {}, {}

    def add(self, name: str, header: headers.Header, payload: np.ndarray, before: torch.Tensor) -> None:
        """Take the frame of one tensor, to be added to the model's tensor `before` when it is asked for.

        Raises a FrameError if the sum could be infinite or the change too large.
        """
        bound = codecs.bound(header, payload)
        if name not in self._largest_before:
            self._largest_before[name] = float(kernels.absmax(before.reshape(-1)))
        change = float(kernels.absmax(self._decoded(header, payload))) if bound is None else bound
        if not change <= LARGEST_MAGNITUDE or not self._largest_before[name] + change <= kernels.FLOAT_MAX:
            raise FrameError(f"a NaN, an infinity or {change:.3g} in {name!r} after the update")
        self.makers[name] = functools.partial(self._make, name, header, payload, before)
        at_most = change * math.sqrt(header.elements)
        self.changes[name] = DeferredChange(at_most, lambda: norm(self._decoded(header, payload)))

    def check(self, name: str, after: torch.Tensor, before: torch.Tensor) -> None:
        """Check a tensor that was decoded at once, as `check_size` does."""
        check_size(name, after, before)

    def _decoded(self, header: headers.Header, payload: np.ndarray) -> torch.Tensor:
        """Return the decoded differences, in memory that the next call uses again."""
        if self._scratch.numel() < header.elements:
            self._scratch = torch.empty(header.elements, dtype=torch.float32, device="cpu")
        difference = self._scratch[: header.elements]
        codecs.decode_payload(header, payload, difference)
        return difference

    def _make(self, name: str, header: headers.Header, payload: np.ndarray, before: torch.Tensor) -> torch.Tensor:
        memory, borrowed = self._lent.get(name, (None, None))
        if memory is None or borrowed is None or borrowed() is not None:  # somebody has a tensor, or a view of one
            memory = np.empty(before.shape, dtype=np.float32)
        lent = memory.view()  # lives as long as tensors and arrays that are made of it
        self._lent[name] = memory, weakref.ref(lent)
        return codecs.decode_onto(header, payload, torch.from_numpy(lent), before.contiguous())


def check_size(name: str, after: torch.Tensor, before: torch.Tensor) -> None:
    """Raise a FrameError if a tensor is not finite, or is so large that it must have diverged, and was not before."""
    if not after.is_floating_point() or (largest := largest_magnitude(after)) <= LARGEST_MAGNITUDE:
        return
    if not before.is_floating_point() or not largest <= largest_magnitude(before):
        raise FrameError(f"a NaN, an infinity or {largest:.3g} in {name!r} after the update")
