"""What an exchange costs, from what was measured: the link, the codec, the number of ranks.

A plain model, in which nothing overlaps. With F bytes of frames a step and rank, in m messages, among W ranks:

    all-gather      m·latency + (W−1)·F / rate + encode + W·decode
    scatter-reduce  2m·latency + 2·(W−1)/W·F / rate + (1 + 1/W)·encode + 2·decode
    all-reduce      2·(W−1)·latency + 2·(W−1)/W·4d / rate               (plain fp32, of d entries; 2d for bf16)

where encode and decode are the seconds for a whole gradient, by one rank, of one rank.

Of the recipe `structured` the model has figures before it is tried, since trying it takes some steps that are slow: it
sends fewer bits than other dense recipes, and takes longer to code.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

import torch

from gradwire.aggregate.transport.link import Link

ROUNDS = 5
PROBES = (2**12, 2**16, 2**20)  # bytes; a larger one only if the last was over too soon to tell the rate
LONG_ENOUGH = 0.005  # seconds
# Of `structured` beside `co3`: the bits of an entry that it saves on gradients with structure, and the seconds that it
# takes more, on one core of a server (docs/structure.md).
STRUCTURE_BITS, STRUCTURE_ENCODE_S, STRUCTURE_DECODE_S = 2.3, 12e-9, 5e-9


@dataclass(frozen=True)
class Speed:
    """The speed of a link, while all its ranks use it at once."""

    latency: float  # seconds of an exchange of a few bytes
    rate: float  # bytes that a rank receives in a second

    @classmethod
    def measure(cls, link: Link) -> Speed:
        """Measure the link, which takes some milliseconds; all ranks call it, and get the same figures."""
        latency = _least_seconds(link, 8, ROUNDS)
        rate = 0.0
        for size in PROBES:
            seconds = _least_seconds(link, size, 2)
            rate = max(1, link.world - 1) * size / max(seconds - latency, 1e-9)
            if seconds > LONG_ENOUGH:
                break
        return cls(latency, rate)


def _least_seconds(link: Link, size: int, rounds: int) -> float:
    """Return the best time of the slowest rank, so that all ranks go by the same figure."""
    best = struct.pack("<d", min(_seconds(link, size) for _ in range(rounds)))
    return max(float(struct.unpack("<d", of_rank)[0]) for of_rank in link.gather_short(best))


def _seconds(link: Link, size: int) -> float:
    start = time.perf_counter()
    gathered, work = link.all_gather(torch.zeros(size, dtype=torch.uint8, device="cpu"))
    link.wait(work)
    if gathered.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Load:
    """What one rank does in one step."""

    frame_bytes: float
    messages: float
    encode_s: float
    decode_s: float  # of one rank's frames

    def all_gather_s(self, speed: Speed, world: int) -> float:
        """Return the seconds of a step by all-gather."""
        wire = self.messages * speed.latency + (world - 1) * self.frame_bytes / speed.rate
        return wire + self.encode_s + world * self.decode_s

    def scatter_reduce_s(self, speed: Speed, world: int) -> float:
        """Return the seconds of a step by scatter-reduce."""
        moved = 2 * (world - 1) / world * self.frame_bytes
        wire = 2 * self.messages * speed.latency + moved / speed.rate
        return wire + (1 + 1 / world) * self.encode_s + 2 * self.decode_s


def all_reduce_s(size: int, speed: Speed, world: int) -> float:
    """Return the seconds of a plain all-reduce of so many bytes."""
    return 2 * (world - 1) * speed.latency + 2 * (world - 1) / world * size / speed.rate


def structure_may_pay(speed: Speed, world: int) -> bool:
    """Tell whether the bits that `structured` saves could take longer on this link than its coding does.

    Both grow with the number of entries, so that only the link decides.
    """
    saved = (world - 1) * STRUCTURE_BITS / 8 / speed.rate
    return saved > STRUCTURE_ENCODE_S + world * STRUCTURE_DECODE_S
