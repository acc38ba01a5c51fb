"""A link over a process group that torch.distributed has not made itself, as those of torchft are.

Such a group has no name and no ranks in a larger one, and is left by cutting its connections: Gloo's abort does
nothing, and to let go of a group waits for the collectives that are under way in it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.aggregate.transport.link import Link

P2P_TAG, CUT_TAG = 0, 1


class UnregisteredLink(Link):
    """One process group that torch.distributed does not know, as exchanges use it.

    It promises what `Link` does, as far as no name of a rank is needed; and that `cut` ends every collective that is
    under way in the group with an error, on this rank and on all others. `cut` may be called from any thread.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)

    def _start_p2p(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> list[dist.Work]:
        works = [self.group.recv([block], rank, P2P_TAG) for rank, block in sorted(received.items())]
        return works + [self.group.send([block], rank, P2P_TAG) for rank, block in sorted(sent.items())]

    def cut(self) -> None:
        """Close the connections to all ranks. A wait for a receive that runs out of time does that, in Gloo."""
        self.closed = True
        for rank in range(self.world):
            if rank != self.rank:
                with suppress(RuntimeError):  # which says that it has run out of time, or that the other has closed it
                    nothing = torch.empty(1, dtype=torch.uint8, device=self.device)
                    self.group.recv([nothing], rank, CUT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave the group, in which nothing is under way any more."""
        self.cut()
