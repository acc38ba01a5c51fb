"""The prefix of a rank's message: 16 bytes in front of its frames, which say what step and what tensors they are of.

0   8   length of what follows the prefix
8   4   step of the sender, modulo 2³²
12  4   fingerprint: CRC-32 of the names, shapes and recipes of what follows
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import AggregateError

ByteArray = npt.NDArray[np.uint8]

PREFIX = 16
_PREFIX = struct.Struct("<QII")
SLACK, ROUND = 64, 128  # room that is filled with padding: 1/64 above the last message, in steps of 128 bytes
ROOM = 1024  # bytes above the last message, at least, of room that is not filled
LONGEST = 2**40  # bytes of a message whose limit is not known


@dataclass
class Subject:
    """What a message is about: a step, and tensors. All messages of an exchange must have the same subject."""

    step: int
    fingerprint: int
    most: int = LONGEST  # bytes that a message about it can have

    def seal(self, block: torch.Tensor, length: int) -> None:
        """Write the prefix of a message that stands in block[16:16+length]."""
        prefix = _PREFIX.pack(length, self.step & 0xFFFFFFFF, self.fingerprint)
        if block.is_cpu:
            block.numpy()[:PREFIX] = np.frombuffer(prefix, dtype=np.uint8)
        else:
            block[:PREFIX] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)

    @property
    def stamp(self) -> int:
        """What the prefix says beside the length, as one number: the step, and above it the fingerprint."""
        return self.fingerprint << 32 | self.step & 0xFFFFFFFF

    def check(self, rank: int, block: ByteArray) -> None:
        """Raise AggregateError unless the block that came from this rank begins with a prefix of this subject."""
        length, step, fingerprint = _PREFIX.unpack_from(block)
        self.check_length(rank, length)
        if step != self.step & 0xFFFFFFFF:
            raise AggregateError(
                f"rank {rank} is at step {step}, this rank at step {self.step}: all ranks must run the same number of "
                f"backward passes (no_sync on all or on none), and load the same checkpoint"
            )
        if fingerprint != self.fingerprint:
            raise AggregateError(
                f"rank {rank} sends other parameters, or with other recipes, than this rank: all ranks must have the "
                f"same model and the same spec"
            )

    def check_length(self, rank: int, length: int) -> None:
        """Raise AggregateError if this rank cannot have a message this long; before memory is taken for it."""
        if not 0 <= length <= self.most:
            raise AggregateError(
                f"rank {rank} announced a message of {length} bytes, of at most {self.most}: its block is damaged"
            )


def length_of(block: ByteArray) -> int:
    """Return the length of the whole message, prefix included, that begins in this block."""
    return PREFIX + int(_PREFIX.unpack_from(block)[0])


def capacity_for(length: int, exact: bool) -> int:
    """Return the room to make for the next message, given the length of this one.

    It is a quarter more, or, where room has to be filled with padding, a little more.
    """
    return length + length // 4 + ROOM if exact else -(-(length + length // SLACK) // ROUND) * ROUND


def padded(block: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return `capacity` bytes that begin with the block's, whatever stands behind its message; zeros fill the rest."""
    if len(block) >= capacity:
        return block[:capacity]
    return torch.cat([block, block.new_zeros(capacity - len(block))])
