"""What ranks must agree on, compared when they attach: version, spec, parameters.

One round of 96 bytes, whose layout never changes (docs/wire-format.md), so that any two versions of gradwire recognize
each other. It carries a digest of the facts. Only if digests differ, the facts themselves follow, and every rank
raises the same error, which says who differs in what.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from gradwire._version import __version__
from gradwire.aggregate.peers.roll_call import RollCall
from gradwire.errors import AggregateError

MAGIC, LAYOUT = b"GWHS", 1
HELLO = struct.Struct("<4sBx18s16sI20s32s")  # magic, layout, address, token, length and version, digest of the facts
MOST = 6  # differences that an error lists
MOST_BYTES = 1 << 28  # of facts

Facts = dict[str, str]
Value = TypeVar("Value")


class Gathering(Protocol):
    """What is needed of a link."""

    rank: int
    world: int

    def gather_short(self, message: bytes) -> list[bytes]: ...


@dataclass
class Hello:
    """The first round of one rank."""

    magic: bytes
    layout: int
    address: bytes
    token: bytes
    length: int
    version: bytes
    digest: bytes


def describe(named: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Parameters and buffers as facts, by name and in order."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{'' if t.requires_grad else ' without gradient'}"
        for name, t in named
    }


def compare(link: Gathering, facts: Mapping[str, str], tensors: Facts, roll_call: RollCall) -> None:
    """Raise an AggregateError on all ranks unless they have the same facts and tensors.

    Ranks get to know each other's addresses, too.
    """
    names = roll_call.ranks
    facts = {"version": __version__, **facts}
    text = json.dumps([facts, tensors]).encode()
    hello = HELLO.pack(
        MAGIC, LAYOUT, roll_call.address, roll_call.board.token, len(text), __version__.encode()[:20],
        hashlib.sha256(text).digest(),
    )  # fmt: skip
    hellos = [Hello(*HELLO.unpack(message)) for message in link.gather_short(hello)]
    _check_first_round(hellos, names)
    roll_call.meet([h.address for h in hellos], hellos[0].token)
    if len({h.digest for h in hellos}) == 1:
        return
    longest = max(h.length for h in hellos)
    if longest > MOST_BYTES:
        raise AggregateError(f"a rank announced {longest} bytes of facts in its handshake: its message is damaged")
    gathered = link.gather_short(text.ljust(longest))
    known = [json.loads(m[: h.length]) for m, h in zip(gathered, hellos, strict=True)]
    found = differences([k[0] for k in known], [k[1] for k in known], names)
    more = f"; and {len(found) - MOST} more differences" if len(found) > MOST else ""
    raise AggregateError(
        f"{'; '.join(found[:MOST])}{more}: all ranks must have the same model, the same spec and the same version of "
        f"gradwire"
    )


def _check_first_round(hellos: Sequence[Hello], names: Sequence[int]) -> None:
    strangers = [rank for rank, h in zip(names, hellos, strict=True) if h.magic != MAGIC]
    if strangers:
        raise AggregateError(
            f"{_ranks(strangers)} sent something else than gradwire's handshake: all ranks must attach the same "
            f"models in the same order"
        )
    if len({(h.layout, h.version) for h in hellos}) > 1:
        # What another version sends next may be something else, so that this is all that can be compared.
        versions = [h.version.rstrip(b"\0").decode("ascii", "replace") for h in hellos]
        raise AggregateError(f"{_odd(versions, names, 'runs gradwire')}: install the same on all machines")


# ── who differs in what ──


def differences(facts: Sequence[Facts], tensors: Sequence[Facts], names: Sequence[int]) -> list[str]:
    """Sentences. What most ranks have is right, or what the first has if they are split evenly."""
    found = [
        _odd([f.get(key, "nothing") for f in facts], names, f"has {key}")
        for key in dict.fromkeys(key for f in facts for key in f)
    ]
    for name in dict.fromkeys(name for t in tensors for name in t):
        values = [t.get(name) for t in tensors]
        usual = _usual(values)
        if usual is None:  # most do not have it
            found += [
                f"rank {r} has a parameter {name!r}, the others do not" for r, v in zip(names, values, strict=True) if v
            ]
        else:
            found += [f"rank {r} has no parameter {name!r}" for r, v in zip(names, values, strict=True) if v is None]
            found.append(_odd([v or usual for v in values], names, f"has {name} as"))
    found = [sentence for sentence in found if sentence]
    if not found:  # the same names and values
        orders = [json.dumps(list(t)) for t in tensors]
        usual_order = _usual(orders)
        odd = [rank for rank, order in zip(names, orders, strict=True) if order != usual_order]
        found.append(f"{_ranks(odd)} has the same parameters in another order")
    return found


def _odd(values: Sequence[str], names: Sequence[int], has: str) -> str:
    """'rank 2 has spec co3, rank 0 ecq', or nothing if all are alike."""
    usual = _usual(values)
    witness = names[values.index(usual)]
    return "; ".join(
        f"rank {rank} {has} {value}, rank {witness} {usual}"
        for rank, value in zip(names, values, strict=True)
        if value != usual
    )


def _usual(values: Sequence[Value]) -> Value:
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])  # the first of equals


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
