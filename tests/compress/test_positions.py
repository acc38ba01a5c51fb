"""Codes of positions, and sparse frames byte by byte: docs/wire-format.md, codec 5, word for word."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gradwire
from gradwire import kernels
from gradwire.compress import golomb, positions
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from support.cases import for_each
from support.helpers import BACKENDS, FLOATS, assemble, check_same, gradient, repair, use_backend
from support.plain_coders import plain_varint
from support.plain_decoder import plain_decode

PRIMES = (1, 2, 3, 31, 997, 10**6 + 3, 2**31 + 11, 2**40 + 15)


def bits_of(data: bytes) -> str:
    return "".join(f"{byte:08b}"[::-1] for byte in data)


def bytes_of(string: str) -> bytes:
    string += "0" * (-len(string) % 8)
    return bytes(int(string[i : i + 8][::-1], 2) for i in range(0, len(string), 8))


def low_bits(number: int, count: int) -> str:
    return "".join(str(number >> i & 1) for i in range(count))


def plain_class(gap: int, m: int) -> tuple[int, str]:
    """Class, and the bits it leaves open."""
    if gap < 2**m:
        return gap, ""
    o = gap.bit_length() - 1
    return (o - m) * 2**m + gap // 2 ** (o - m), low_bits(gap, o - m)


def gaps_of(chosen: list[int]) -> list[int]:
    return [b - a - 1 for a, b in zip([-1, *chosen], chosen, strict=False)]


chosen_of = st.sets(st.integers(0, 600), min_size=1, max_size=200).map(sorted)


# ── Golomb ────────────────────────────────────────────────────────────────────────────────────────


def test_paper() -> None:
    """b* and bits per position of arXiv 1805.08768."""
    for p, b, bits in ((0.1, 3, 4.756), (0.01, 6, 8.108), (0.001, 9, 11.495)):
        assert golomb.best_for(p) == b
        assert golomb.expected_bits(p) == pytest.approx(bits, abs=5e-4)
    assert golomb.best_for(1.0) == golomb.best_for(0.9) == 0
    assert golomb.best_for(2.0**-48) == golomb.LARGEST


@given(chosen_of, st.integers(0, 12))
def test_golomb_is_the_documented_code(chosen: list[int], b: int) -> None:
    gaps = np.array(gaps_of(chosen), dtype=np.int64)
    string = "".join("0" * (g >> b) + "1" + low_bits(g, b) for g in gaps.tolist())
    for name in BACKENDS:
        with use_backend(name):
            assert kernels.split_gaps(np.array(chosen)).tolist() == gaps.tolist()
            coded = kernels.golomb_encode(gaps, b)
            assert coded == bytes_of(string)
            assert kernels.golomb_bits(gaps, b) == len(string)
            found, end = kernels.golomb_positions(memoryview(coded + b"\xff\x00"), 0, len(chosen), b, 601, -1)
            assert found.tolist() == chosen and end == len(string)
            with pytest.raises(FrameError):
                kernels.golomb_positions(memoryview(coded), 0, len(chosen), b, chosen[-1], -1)
            with pytest.raises(FrameError):
                kernels.golomb_positions(memoryview(coded[:-1]), 0, len(chosen), b, 601, -1)


@given(chosen_of)
def test_the_best_parameter_is_found(chosen: list[int]) -> None:
    gaps = np.array(gaps_of(chosen))
    lengths = [kernels.golomb_bits(gaps, b) for b in range(48)]
    for elements in (601, 10**6, 2**40):  # wherever the search starts
        b, bits = golomb.choose(gaps, elements)
        assert (b, bits) == (lengths.index(min(lengths)), min(lengths))


@pytest.mark.parametrize("b", [0, 1, 30, 47])
def test_long_codes(backend: str, b: int) -> None:
    """Quotients of more than 56 bits, and remainders up to 47, at every place within a byte."""
    top = 2**48 - 2**20 if b == 47 else 300 << b
    gaps = np.array([0, 1, (1 << b) - 1, 55 << b, 0, 57 << b, 200 << b, 3] * 3 if b < 40 else [3, top - 10, 1])
    chosen = np.cumsum(gaps + 1) - 1
    coded = kernels.golomb_encode(gaps, b)
    found, end = kernels.golomb_positions(memoryview(coded), 0, len(gaps), b, int(chosen[-1]) + 1, -1)
    assert found.tolist() == chosen.tolist() and -(-end // 8) == len(coded)


# ── classes ───────────────────────────────────────────────────────────────────────────────────────


@example([2**48 - 1], 1)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**42)), min_size=1, max_size=60), st.integers(0, 2))
def test_classes_are_the_documented_ones(gaps: list[int], m: int) -> None:
    array = np.array(gaps, dtype=np.int64)
    plain = [plain_class(g, m) for g in gaps]
    for name in BACKENDS:
        with use_backend(name):
            classes, low = kernels.gap_classes(array, m)
            assert classes.tolist() == [c for c, _ in plain] == [positions.class_of(g, m) for g in gaps]
            assert low == bytes_of("".join(open_ for _, open_ in plain))
            assert kernels.gap_counts(array, m).tolist() == np.bincount(classes, minlength=256).tolist()
            for gap, one, (_, open_) in zip(gaps, classes, plain, strict=True):
                tail = memoryview(bytes_of("1" + open_))  # behind another bit
                found, end = kernels.class_positions(one[None], m, tail, 1, 2**48, -1)
                assert found.tolist() == [gap] and end == 1 + len(open_)
                if len(tail) > 1:
                    with pytest.raises(FrameError):
                        kernels.class_positions(one[None], m, tail[:-1], 1, 2**48, -1)


@given(chosen_of, st.sampled_from(positions.WAYS), st.sampled_from([601, 10**9, 2**48 - 1]))
def test_positions_come_back(chosen: list[int], way: str, elements: int) -> None:
    kind, coded = positions.encode(np.array(chosen), elements, way)
    assert {"golomb": kind == positions.GOLOMB, "rans": kind == positions.CLASSES}.get(way, True)
    reader = Reader(memoryview(coded + b"more"))
    assert positions.read(reader, kind, len(chosen), elements).tolist() == chosen
    assert bytes(reader.rest()) == b"more"


@given(st.integers(0, 10**6), st.sampled_from([3, 30, 300, 3000]), st.sampled_from([0.003, 0.1, 0.7]))
def test_auto_takes_the_shorter(seed: int, rows: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    filled = rng.random((rows, 50)) < rng.choice([0, density], size=(rows, 1))
    chosen = np.flatnonzero(filled)
    if len(chosen):
        size = {way: len(positions.encode(chosen, filled.size, way)[1]) for way in positions.WAYS}
        assert size["auto"] <= size["golomb"]
        if size["rans"] < 0.99 * size["golomb"]:
            assert size["auto"] == size["rans"]


def test_beyond_32_bits(backend: str) -> None:
    chosen = np.cumsum(np.array(PRIMES * 3))
    for way in positions.WAYS:
        kind, coded = positions.encode(chosen, 2**47, way)
        assert positions.read(Reader(memoryview(coded)), kind, len(chosen), 2**47).tolist() == chosen.tolist()


@pytest.mark.parametrize("way", ["golomb", "rans"])
@pytest.mark.parametrize("size", [1, 7, 8, 1000])
def test_positions_come_in_parts_of_any_size(backend: str, way: str, size: int) -> None:
    chosen = np.flatnonzero(np.random.default_rng(1).random(900) < 0.3)
    kind, coded = positions.encode(chosen, 900, way)
    found = positions.open_positions(Reader(memoryview(coded + b"more")), kind, len(chosen), 900)
    for _ in range(2):  # as often as they are asked for
        parts = list(found.parts(size))
        assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
        assert np.concatenate(parts).tolist() == chosen.tolist()
    assert found.end == len(coded)
    again = positions.open_positions(Reader(memoryview(coded + b"more")), kind, len(chosen), 900)
    assert again.end == len(coded)  # without having decoded them before


def test_sums_of_gaps_that_overflow(backend: str) -> None:
    classes, low = np.full(70_000, 48, dtype=np.uint8), memoryview(b"\xff" * (47 * 70_000 // 8))  # gaps of 2⁴⁸ − 1
    for limit in (2**48 - 1, 2**48):
        with pytest.raises(FrameError):
            kernels.class_positions(classes, 0, low, 0, limit, -1)


def test_clusters_are_shorter_as_classes(backend: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.choice(2000, size=40, replace=False)[:, None] * 100
    chosen = np.sort((rows + np.arange(100)).ravel()[rng.random(4000) < 0.6])
    kind, coded = positions.encode(chosen, 200_000)
    _, plain = positions.encode(chosen, 200_000, "golomb")
    assert kind == positions.CLASSES and len(coded) < 0.7 * len(plain)
    everything = np.arange(5000)
    assert len(positions.encode(everything, 5000)[1]) < 8


# ── frames ────────────────────────────────────────────────────────────────────────────────────────


SPECS = [
    f"{name},positions={way}"
    for name in ("sbc:p=0.1", "stc:p=0.1", *(f"topk:p=0.1,values={v}" for v in ("fp32", "fp16", "bf16", "fp4", "fp8")))
    for way in positions.WAYS
]


@for_each("spec", SPECS)
def test_frames_follow_the_page(backend: str, spec: str) -> None:
    for dtype in FLOATS:
        for count in (1, 10, 999):
            frame = gradwire.codec(spec).encode(gradient(count, scale=10).to(dtype))
            check_same(gradwire.decode(frame), plain_decode(frame).tensor)


def test_bytes_by_hand(backend: str) -> None:
    x = torch.zeros(1000)
    x[[2, 5, 8]] = torch.tensor([4.0, 2.0, 3.0])
    # k = 3; one value, Golomb; b = 0 (1 would be as long): gaps 2, 2, 2, so 001 001 001; the mean
    payload = bytes([3, 0x00, 0, 0b00100100, 1]) + struct.pack("<f", 3.0)
    assert gradwire.codec("sbc:k=3,positions=golomb").encode(x) == assemble(payload, (1000,), 5)
    x[5] = -2.0
    payload = bytes([3, 0x01, 0, 0b00100100, 1]) + struct.pack("<f", 3.0) + bytes([0b010])
    assert gradwire.codec("stc:k=3,positions=golomb").encode(x) == assemble(payload, (1000,), 5)
    payload = bytes([3, 0x02, 0, 0b00100100, 1]) + struct.pack("<3f", 4, -2, 3)
    assert gradwire.codec("topk:k=3,positions=golomb,values=fp32").encode(x) == assemble(payload, (1000,), 5)


ONE = struct.pack("<f", 1.0)
INVALID = {
    "empty": b"",
    "more positions than elements": plain_varint(1001) + bytes([0, 0]) + b"\xff" * 200 + ONE,
    "nothing and more": bytes([0, 0]),
    "no kind": bytes([1]),
    "values 6": bytes([1, 6, 0, 1]) + ONE,
    "positions 2": bytes([1, 0x20, 0, 1]) + ONE,
    "b 48": bytes([1, 0, 48, 1, 0, 0, 0, 0, 0, 0]) + ONE,
    "position beyond": bytes([1, 0, 9, 0xFE, 0x07]) + ONE,
    "quotient beyond": bytes([1, 0, 47, 0x80]) + bytes(6) + ONE,
    "no one in sight": bytes([1, 0, 0]) + bytes(100),
    "padding": bytes([1, 0, 0, 0b11]) + ONE,
    "value cut": bytes([1, 0, 0, 1]) + ONE[:3],
    "value long": bytes([1, 0, 0, 1]) + ONE + b"\0",
    "value 0": bytes([1, 0, 0, 1]) + bytes(4),
    "value inf": bytes([1, 0, 0, 1]) + struct.pack("<f", math.inf),
    "value nan": bytes([1, 0, 0, 1]) + struct.pack("<f", math.nan),
    "magnitude negative": bytes([1, 1, 0, 1]) + struct.pack("<f", -1.0) + b"\0",
    "signs missing": bytes([1, 1, 0, 1]) + ONE,
    "signs padding": bytes([1, 1, 0, 1]) + ONE + b"\2",
    "fp32 nan": bytes([1, 2, 0, 1]) + struct.pack("<f", math.nan),
    "fp16 inf": bytes([1, 3, 0, 1, 0, 0x7C]),
    "bf16 long": bytes([1, 4, 0, 1, 0, 0, 0]),
    "minifloat cut": bytes([1, 5, 0, 1, 0]),
    "m 3": bytes([1, 0x10, 3, 2, 1, 0]) + ONE,
    "classes cut": bytes([1, 0x10, 0, 9, 1, 0]) + ONE,
    "class beyond": bytes([1, 0x10, 0, 2, 1, 11]) + ONE,
    "gap beyond": bytes([1, 0x10, 0, 2, 1, 10, 0xFF, 0xFF]) + ONE,
    "low bits padding": bytes([1, 0x10, 0, 2, 1, 2, 2]) + ONE,
    "classes that add up beyond": bytes([3, 0x10, 0, 2, 1, 9, 255, 255, 255]) + ONE,
}


@for_each("name", list(INVALID))
def test_invalid_payloads(backend: str, name: str) -> None:
    with pytest.raises(FrameError):
        gradwire.decode(assemble(INVALID[name], (1000,), 5))


def test_frames_of_what_is_always_stored(backend: str) -> None:
    for shape, dtype in (((0,), torch.float32), ((1000,), torch.int32)):
        with pytest.raises(FrameError):
            gradwire.decode(assemble(bytes([1, 0, 0, 1]) + ONE, shape, 5, dtype))


@pytest.mark.thorough
def test_damage_is_found_or_harmless() -> None:
    """Only FrameError, and every backend says the same."""
    rng = random.Random(0)
    for i in range(1500):
        frame = bytearray(gradwire.codec(SPECS[i % len(SPECS)]).encode(gradient(200, i % 7)))
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(9, len(frame))
            match rng.randrange(4):
                case 0:
                    frame[at] ^= 1 << rng.randrange(8)
                case 1:
                    frame[at] = rng.randrange(256)
                case 2:
                    del frame[at:]
                    break
                case _:
                    frame[at:at] = rng.randbytes(rng.choice((1, 3)))
        damaged = repair(bytes(frame[:9]) + resized(bytes(frame[9:])))
        outcomes = []
        for name in ("reference", BACKENDS[-1]):
            with use_backend(name):
                try:
                    outcomes.append(gradwire.decode(damaged, max_elements=10_000).nan_to_num().tolist())
                except FrameError:
                    outcomes.append(None)
        assert outcomes[0] == outcomes[1]


def resized(body: bytes) -> bytes:
    """The length of the payload made right again; the first shape field is taken as it is."""
    if len(body) < 4:
        return body
    at = 0
    while at < len(body) and body[at] >= 128:
        at += 1
    shape_end = at + 1
    while shape_end < len(body) and body[shape_end] >= 128:
        shape_end += 1
    length = max(0, len(body) - shape_end - 1)
    return plain_varint(length) + body[at + 1 :]
