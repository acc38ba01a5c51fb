"""Messages that the host does not wait for: their lengths, and whether all is well, it learns when they are long over.

A block has a fixed number of bytes: prefix, a note of one byte, frames, padding. Kernels write prefix and note, and
read those of the other ranks. The note is 0 if all tensors are there, 2 if the message has to wait, because it does not
fit or is unusual, and 3 if something in it is not finite; in place of frames then stands how long they are (8 bytes),
or 0 if they would fit. If any rank's message waits, those of all ranks do: the mean is zero, and error memories keep
all that was to be sent. If any is not finite, the mean is NaN.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.cuda_runtime.launcher import Arguments
from gradwire.cuda_runtime.programs import Launches
from gradwire.gpu.decoder import Blocks, FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import SOME_BLOCKS, FrameTask
from gradwire.gpu.layout import MessageLayout
from gradwire.gpu.structures import NONFINITE, STATUS
from gradwire.gpu.workspace import recorded

PREFIX = 16
FRONT = PREFIX + 1  # prefix and note
TOLD = FRONT + 8  # bytes of each message that the host is told


@dataclass
class Outcome:
    """What the host is told of an exchange."""

    status: torch.Tensor
    fronts: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until everything else is known."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def finite(self) -> bool:
        """Whether all that any rank has sent is finite."""
        return not self._bits & NONFINITE

    @property
    def waited(self) -> bool:
        """Whether the messages wait: nothing has reached the mean, which is zero, or NaN."""
        return bool(self._bits)

    @property
    def prefixes(self) -> list[np.ndarray]:
        """The prefixes of the messages of all ranks."""
        return list(self._fronts[:, :PREFIX])

    @property
    def needed(self) -> list[int]:
        """How long the frames of each rank are, if that is why they wait, and else 0; of messages that wait."""
        waits = self._fronts[:, PREFIX] != 0
        lengths = np.ascontiguousarray(self._fronts[:, FRONT:]).view("<u8")[:, 0]
        return [int(length) if waiting else 0 for length, waiting in zip(lengths, waits, strict=True)]

    @property
    def _fronts(self) -> np.ndarray:
        return self.fronts.numpy().reshape(-1, TOLD)

    @property
    def _bits(self) -> int:
        return int(self.status.numpy().view(STATUS)[0]["bits"])


class UnattendedMessages:
    """Encodes and averages messages of one device without waiting, on the current stream of the calling thread.

    Each key has buffers of its own, so that a message may be under way for every key. The outcome of an exchange has to
    be waited for before the next one with the same key.
    """

    def __init__(self, encoder: MessageEncoder, decoder: MessageDecoder):
        self._encoder, self._decoder, self.device = encoder, decoder, encoder.device
        self._planned: dict[Hashable, _Planned] = {}

    def encode(
        self, key: Hashable, tasks: Sequence[FrameTask], block: torch.Tensor, stamp: int, everything: bool = False
    ) -> MessageLayout:
        """Write a message to the block, as far as it fits; `stamp` is what its prefix says of step and tensors.

        Memories of tensors that are zero stay as they are, or are sent, too, with `everything`.
        """
        layout = self._encoder.prepared(tasks, block[FRONT:], key, stamp, everything)
        planned = self._planned.get(("encode", key))
        if planned is None or not planned.is_for(layout.on_device):
            launches = Launches(self.device)
            launches.add("unattended", "find_absent", len(layout.tensors), 256, layout.on_job)
            launches.extend(layout.launches)
            launches.add("unattended", "seal", 1, 1, layout.on_job)
            planned = self._planned["encode", key] = _Planned((layout.on_device,), launches)
        planned.launches.start()
        return layout

    def average(
        self, key: Hashable, encoded: MessageLayout, frames: Sequence[FrameTarget], blocks: Sequence[torch.Tensor],
        stamp: int,
    ) -> Outcome:  # fmt: skip
        """Replace the tensors by the mean of the messages in all ranks' blocks, and complete the error memories.

        `encoded` is this rank's message, of the same tensors in the same order.
        """
        world = len(blocks)
        everything = [[True] * sum([len(frame.tensors) for frame in frames])] * world
        layout = self._decoder.prepared(
            frames, blocks, everything, 1 / world, blocks=Blocks(key, FRONT, TOLD * world, stamp)
        )
        planned = self._planned.get(("average", key))
        if planned is None or not planned.is_for(encoded.on_device, layout.on_device):
            launches = Launches(self.device)
            launches.add(
                "unattended", "open_messages", 1, 64, Arguments(layout.on_device, layout.report_on_device)
            )  # fmt: skip
            launches.extend(layout.launches)
            for batch in encoded.batches.values():
                arguments = Arguments(batch.job, batch.tiles, batch.tile_count, layout.on_device)
                launches.add("unattended", "conclude", min(batch.tile_count, SOME_BLOCKS), 256, arguments)
            planned = self._planned["average", key] = _Planned((encoded.on_device, layout.on_device), launches)
        planned.launches.start()
        layout.fetch_status()
        return Outcome(layout.status, layout.report, recorded(self.device))


@dataclass
class _Planned:
    """Launches for as long as what they are for is where it was."""

    places: tuple[torch.Tensor, ...]
    launches: Launches

    def is_for(self, *places: torch.Tensor) -> bool:
        """Tell whether these are the same tensors, not only equal ones."""
        return all(mine is other for mine, other in zip(self.places, places, strict=True))
