"""Count-sketch: the baseline that sums without decoding."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import FrameError
from ..wire import Header


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    raise FrameError("not yet")
