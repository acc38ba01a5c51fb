"""Hostile packets at an aggregator and at workers: those that were kept, and a few thousand of the fuzzer's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gradwire import AggregateError
from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregator.packet import packet_format
from gradwire.aggregator.packet.packet_format import Accept, Kind, Packet
from support.hostile_packets import KEY, Hostile

pytest.importorskip("gradwire._native")
import fuzz_aggregator

CORPUS = Path(__file__).with_name("hostile.packets")


def kept() -> list[bytes]:
    lines = [line.partition("#")[0].strip() for line in CORPUS.read_text().splitlines()]
    return [bytes.fromhex(line) for line in lines if line]


def test_kept_packets_change_nothing() -> None:
    """Each as it is, and with the number of an honest session in it."""
    target, rng = fuzz_aggregator.Target(), random.Random(0)
    try:
        assert len(kept()) > 50
        for datagram in kept():
            for session in (b"", *(job.session.to_bytes(4, "little") for job in target.jobs)):
                changed = datagram[:4] + session + datagram[8:] if session else datagram
                target.attack(Hostile(changed, packet_format.has_code_of(changed, KEY)), rng)
        for job in target.jobs:
            job.sum_once(rng)
    finally:
        target.close()


def test_the_fuzzer_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = fuzz_aggregator.parse(["--packets", "2000", "--seed", "7", "--save", str(tmp_path)])
    assert fuzz_aggregator.run(options) == 0, capsys.readouterr().out
    assert "sums of honest jobs" in capsys.readouterr().out


def test_the_fuzzer_finds_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An aggregator that takes every packet for one of a worker."""
    monkeypatch.setattr(Packet, "has_code_of", lambda *_: True)
    options = fuzz_aggregator.parse(["--packets", "2000", "--seed", "7", "--save", str(tmp_path)])
    assert fuzz_aggregator.run(options) == 1
    assert "FINDING" in capsys.readouterr().out
    assert list(tmp_path.iterdir())


class Answering:
    """Stands in for the native client: HELLO gets these packets, which have the right code, with the right nonce."""

    def __init__(self, kind: Kind, rest: bytes) -> None:
        self.kind, self.rest, self.answers = kind, rest, []

    def send(self, datagram: bytes) -> None:
        self.answers = [Packet(self.kind, payload=datagram[32:48] + self.rest).pack(KEY)]

    def receive(self, seconds: float) -> list[bytes]:
        return self.answers

    def stopped(self) -> bool:
        return False

    def refused(self) -> bool:
        return False


@pytest.mark.parametrize("length", [0, 1, 31, 33, 1000])
def test_an_accept_of_another_length_is_no_accept(length: int) -> None:
    who = aggregator_join.Membership("here:1", KEY, bytes(16), 0, 1)
    with pytest.raises(AggregateError, match="no answer"):
        aggregator_join.join(Answering(Kind.ACCEPT, bytes(length)), who, 0, aggregator_join.time.monotonic() + 0.05)
    whole = Accept(bytes(16), bytes(16), 5, 4, 0).pack()[16:]
    accepted = aggregator_join.join(Answering(Kind.ACCEPT, whole), who, 0, aggregator_join.time.monotonic() + 5)
    assert (accepted.session, accepted.slots) == (5, 4)
