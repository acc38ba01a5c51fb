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
MOST_LISTED = 6  # differences that an error lists
MOST_BYTES = 1 << 28  # of facts

Facts = dict[str, str]
_Value = TypeVar("_Value")


class Gatherer(Protocol):
    """What the handshake needs of a link."""

    rank: int
    world: int

    def gather_short(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, which are equally long."""
        ...


@dataclass
class Hello:
    """What one rank sends in the first round."""

    magic: bytes
    layout: int
    address: bytes
    token: bytes
    length: int
    version: bytes
    digest: bytes


def describe(named: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Return parameters and buffers as facts: dtype and shape by name, in order."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{'' if t.requires_grad else ' without gradient'}"
        for name, t in named
    }


def check_agreement(link: Gatherer, facts: Mapping[str, str], tensors: Facts, roll_call: RollCall) -> None:
    """Raise an AggregateError on all ranks unless they have the same facts and tensors.

    Ranks get to know each other's addresses, too, and the roll call is started.
    """
    ranks = roll_call.ranks
    facts = {"version": __version__, **facts}
    text = json.dumps([facts, tensors]).encode()
    hello = HELLO.pack(
        MAGIC, LAYOUT, roll_call.address, roll_call.status.token, len(text), __version__.encode()[:20],
        hashlib.sha256(text).digest(),
    )  # fmt: skip
    hellos = [Hello(*HELLO.unpack(message)) for message in link.gather_short(hello)]
    _check_first_round(hellos, ranks)
    roll_call.start([h.address for h in hellos], hellos[0].token)
    if len({h.digest for h in hellos}) == 1:
        return
    longest = max(h.length for h in hellos)
    if longest > MOST_BYTES:
        raise AggregateError(f"a rank announced {longest} bytes of facts in its handshake: its message is damaged")
    gathered = link.gather_short(text.ljust(longest))
    contents = [json.loads(m[: h.length]) for m, h in zip(gathered, hellos, strict=True)]
    sentences = differences([c[0] for c in contents], [c[1] for c in contents], ranks)
    more = f"; and {len(sentences) - MOST_LISTED} more differences" if len(sentences) > MOST_LISTED else ""
    raise AggregateError(
        f"{'; '.join(sentences[:MOST_LISTED])}{more}: all ranks must have the same model, the same spec and the same "
        f"version of gradwire"
    )


def _check_first_round(hellos: Sequence[Hello], ranks: Sequence[int]) -> None:
    strangers = [rank for rank, h in zip(ranks, hellos, strict=True) if h.magic != MAGIC]
    if strangers:
        raise AggregateError(
            f"{_list_ranks(strangers)} sent something else than gradwire's handshake: all ranks must attach the same "
            f"models in the same order"
        )
    if len({(h.layout, h.version) for h in hellos}) > 1:
        # What another version sends next may be something else, so that this is all that can be compared.
        versions = [h.version.rstrip(b"\0").decode("ascii", "replace") for h in hellos]
        raise AggregateError(f"{_name_deviants(versions, ranks, 'runs gradwire')}: install the same on all machines")


# ── who differs in what ──


def differences(facts: Sequence[Facts], tensors: Sequence[Facts], ranks: Sequence[int]) -> list[str]:
    """Return a sentence for each difference between the ranks.

    What most ranks have counts as right; if they are split evenly, it is what the first one has.
    """
    sentences = [
        _name_deviants([f.get(key, "nothing") for f in facts], ranks, f"has {key}")
        for key in dict.fromkeys(key for f in facts for key in f)
    ]
    for name in dict.fromkeys(name for t in tensors for name in t):
        values = [t.get(name) for t in tensors]
        usual = _most_common(values)
        if usual is None:  # most do not have it
            having = [rank for rank, value in zip(ranks, values, strict=True) if value]
            sentences += [f"rank {rank} has a parameter {name!r}, the others do not" for rank in having]
        else:
            lacking = [rank for rank, value in zip(ranks, values, strict=True) if value is None]
            sentences += [f"rank {rank} has no parameter {name!r}" for rank in lacking]
            sentences.append(_name_deviants([value or usual for value in values], ranks, f"has {name} as"))
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:  # the same names and values
        orders = [json.dumps(list(t)) for t in tensors]
        usual_order = _most_common(orders)
        deviants = [rank for rank, order in zip(ranks, orders, strict=True) if order != usual_order]
        sentences.append(f"{_list_ranks(deviants)} has the same parameters in another order")
    return sentences


def _name_deviants(values: Sequence[str], ranks: Sequence[int], verb: str) -> str:
    """Return 'rank 2 has spec co3, rank 0 ecq' for the ranks that differ from most; empty if all have the same."""
    usual = _most_common(values)
    witness = ranks[values.index(usual)]
    return "; ".join(
        f"rank {rank} {verb} {value}, rank {witness} {usual}"
        for rank, value in zip(ranks, values, strict=True)
        if value != usual
    )


def _most_common(values: Sequence[_Value]) -> _Value:
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])  # the first of equals


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
