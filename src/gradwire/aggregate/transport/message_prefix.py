"""What precedes the frames of a rank on the wire: 16 bytes that tell which step and which tensors they are of.

0   8   length of what follows the prefix
8   4   step of the sender, modulo 2³²
12  4   fingerprint: CRC-32 of the names, shapes and recipes of what follows
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import AggregateError

PREFIX = 16
_PREFIX = struct.Struct("<QII")
SLACK, ROUND = 64, 128  # room that is filled up: 1/64 above the last message, in steps of 128 bytes
ROOM = 1024  # bytes at least beyond the last message, of room that is not
LONGEST = 2**40  # bytes of a message of which nothing better is known


@dataclass
class Subject:
    """What a message is about; all ranks' messages of an exchange must be about the same."""

    step: int
    fingerprint: int
    most: int = LONGEST  # bytes that it can have

    def seal(self, block: torch.Tensor, length: int) -> None:
        """Write the prefix of a message that stands in block[16:16+length]."""
        _PREFIX.pack_into(block.numpy(), 0, length, self.step & 0xFFFFFFFF, self.fingerprint)

    def check(self, rank: int, block: np.ndarray) -> None:
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
        """Before memory is taken for so many bytes."""
        if not 0 <= length <= self.most:
            raise AggregateError(
                f"rank {rank} announced a message of {length} bytes, of at most {self.most}: its block is damaged"
            )


def length_of(block: np.ndarray) -> int:
    """Of the whole message, prefix included."""
    return PREFIX + _PREFIX.unpack_from(block)[0]


def capacity_for(length: int, exact: bool) -> int:
    """Room for a message of the next time: a quarter more than this one needs or, where room has to be filled up with
    padding, a little more."""
    return length + length // 4 + ROOM if exact else -(-(length + length // SLACK) // ROUND) * ROUND


def padded(block: torch.Tensor, capacity: int) -> torch.Tensor:
    """The front of the block, with whatever stands behind the message as padding; zeros where it ends."""
    if len(block) >= capacity:
        return block[:capacity]
    return torch.cat([block, block.new_zeros(capacity - len(block))])
