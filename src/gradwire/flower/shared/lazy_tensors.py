"""Tensors of updates that a server decodes when its strategy asks for them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import numpy as np
import torch

from gradwire import codecs, kernels
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.kernels.reference import FLOAT_MAX

MOST = 2.0**60  # of a change: what is larger has diverged, and its square, which adaptive strategies take, overflows
Tensor = Callable[[], torch.Tensor]  # one that is made when it is asked for


class Later:
    """Large tensors of updates to one model, decoded whenever they are asked for.

    Held by a server, the models of a hundred clients would be gigabytes of new memory in every round. For the same
    reason a tensor that nobody holds any more makes room for the next of its name.

    That they are finite is known before: the side information of a frame bounds its entries, or it is decoded once to
    see. That symbols can be decoded is not known of the former, and a forged frame raises a FrameError then.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # of the last update
        self._largest: dict[str, float] = {}  # magnitudes in the model
        self._scratch = torch.empty(0)
        self._made: dict[str, np.ndarray] = {}  # the last one of each name

    def add(self, name: str, header: headers.Header, payload: np.ndarray, tensor: torch.Tensor) -> None:
        bound = codecs.bound(header, payload)
        if name not in self._largest:
            self._largest[name] = float(kernels.absmax(tensor.reshape(-1)))
        change = self._measured(header, payload) if bound is None else bound
        if not change <= MOST or not self._largest[name] + change <= FLOAT_MAX:
            raise FrameError(f"a NaN, an infinity or {change:.3g} in {name!r} after the update")
        self.tensors[name] = functools.partial(self._make, name, header, payload, tensor)

    def _measured(self, header: headers.Header, payload: np.ndarray) -> float:
        if self._scratch.numel() < header.elements:
            self._scratch = torch.empty(header.elements)
        difference = self._scratch[: header.elements]
        codecs.decode_payload(header, payload, difference)
        return float(kernels.absmax(difference))

    def _make(self, name: str, header: headers.Header, payload: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
        room = self._made.get(name)
        # Ours, `room` and the argument are three; a view or a tensor of its memory would be a fourth.
        if room is None or sys.getrefcount(room) > 3:
            room = self._made[name] = torch.empty(tensor.shape).numpy()
        return codecs.decode_onto(header, payload, torch.from_numpy(room), tensor.contiguous())
