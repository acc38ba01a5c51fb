"""Memory for what a tensor becomes on its way into a frame, which a thread keeps for the next tensor.

Memory that comes fresh from the system costs more than what is written to it: half a nanosecond an entry in fp32.
"""

from __future__ import annotations

import threading

import torch

MOST = 1 << 22  # entries: what is larger comes and goes
# Large tensors begin at the same place in a page. Stores to one at that place would hold up loads from another, so what
# is kept begins this many entries later.
ASIDE = 512


class KeptMemory(threading.local):
    """A tensor of each name, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def room(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` entries with any contents, which are the caller's until the next call with this name."""
        if count > MOST:
            return torch.empty(count, dtype=dtype, device="cpu")
        kept = self._kept.get(name)
        if kept is None or len(kept) < count + ASIDE:
            kept = self._kept[name] = torch.empty(count + ASIDE, dtype=dtype, device="cpu")
        return kept[ASIDE : ASIDE + count]
