"""Sparse codecs: the payload they share, positions and values of the entries that are sent."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import FrameError
from ..wire import Header


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    raise FrameError("not yet")
