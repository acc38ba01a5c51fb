"""What replicas tell each other when a quorum begins: with what settings they run, and which rounds they committed."""

from __future__ import annotations

import json
import secrets
import zlib
from dataclasses import asdict, dataclass, field

import torch

from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject
from gradwire.errors import AggregateError

_SUBJECT = Subject(0, zlib.crc32(b"gradwire.torchft 1"), most=2**16)


@dataclass(frozen=True)
class Introduction:
    """What one replica says of itself."""

    facts: dict[str, str]  # what must be the same everywhere
    clock: int  # how many rounds are behind its weights
    committed: dict[int, int]  # for each of the last quorums, the clock after the last round that counts
    lot: int = field(default_factory=lambda: secrets.randbits(62))  # the first replica's becomes the quorum's number

    def to_bytes(self) -> bytes:
        """Return the introduction as it travels."""
        return json.dumps({**asdict(self), "committed": list(self.committed.items())}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Introduction:
        """Return what `to_bytes` was made of; ValueError, KeyError or TypeError if it is something else."""
        said = json.loads(text)
        facts = {str(name): str(value) for name, value in said["facts"].items()}
        committed = {int(quorum): int(clock) for quorum, clock in said["committed"]}
        return cls(facts, int(said["clock"]), committed, int(said["lot"]))


def introduce(link: Link, own: Introduction) -> list[Introduction]:
    """Return the introductions of all replicas of the link, in rank order; all of them call it."""
    text = own.to_bytes()
    block = torch.frombuffer(bytearray(PREFIX) + text, dtype=torch.uint8)
    gather = AllGather(link)
    messages = gather.finish_in_host_memory(gather.start("introduction", _SUBJECT, block, len(text)))
    return [_read(rank, message.tobytes()) for rank, message in enumerate(messages)]


def _read(rank: int, text: bytes) -> Introduction:
    try:
        return Introduction.from_bytes(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AggregateError(f"replica {rank} introduces itself in a way that this version cannot read") from error


def furthest(introductions: list[Introduction]) -> int:
    """Return the rank of a replica whose training has come furthest: the others take its weights."""
    return max(range(len(introductions)), key=lambda rank: (introductions[rank].clock, -rank))


def difference(of: Introduction, rank: int, right: Introduction, right_rank: int) -> str:
    """Return in what the first replica differs from the second one, in words; empty if in nothing."""
    names = [*right.facts, *(name for name in of.facts if name not in right.facts)]
    found = [
        f"{name} {of.facts.get(name, 'unknown')}, replica {right_rank} {right.facts.get(name, 'unknown')}"
        for name in names
        if of.facts.get(name) != right.facts.get(name)
    ]
    return f"replica {rank} has {'; '.join(found)}" if found else ""
