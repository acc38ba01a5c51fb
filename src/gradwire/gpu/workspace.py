"""Memory on the device that kernels need between two launches: taken once, and kept for all messages."""

from __future__ import annotations

from typing import Any

import torch

MOST_LAYOUTS = 256  # that are kept: which parameters get a gradient may differ in every step


class Workspace:
    """Named buffers that only grow. `version` changes whenever one of them is somewhere else than before.

    All work that uses a workspace is on one stream, one message after the other.
    """

    def __init__(self, device: torch.device):
        self.device, self.version = device, 0
        self._buffers: dict[str, torch.Tensor] = {}

    def room(self, name: str, size: int) -> torch.Tensor:
        """Return a buffer of at least this many bytes, zero where nothing was written yet."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            grown = size + size // 4 + 4096
            buffer = self._buffers[name] = torch.zeros(grown, dtype=torch.uint8, device=self.device)
            self.version += 1
        return buffer


def make_room(layouts: dict[tuple[object, ...], Any]) -> None:
    """Forget the oldest layout, if there are too many; it is made again if its message comes again."""
    if len(layouts) >= MOST_LAYOUTS:
        del layouts[next(iter(layouts))]


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Return bytes in the host's memory from and to which the device can copy while the host goes on."""
    return torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind all that the calling thread has started on the device; None if that is over already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
