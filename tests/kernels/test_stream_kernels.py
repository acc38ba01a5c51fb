"""Kernels that code many streams at once: their bytes are those of one stream after the other, by Python."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import compress, kernels
from gradwire.compress import rans
from gradwire.convert import class_streams
from gradwire.convert.grid_search import Curve
from gradwire.convert.scale_classes import read_symbols, write_symbols
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint
from support.cases import for_each
from support.helpers import BACKENDS, gradient, use_backend

NATIVE = [name for name in BACKENDS if name != "reference"]


def classes_of(largest: int, sizes: list[int], spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Symbols of classes whose entries are larger and larger, and how often each occurs in each class."""
    rng = np.random.default_rng(seed)
    parts = [
        np.clip(np.rint(rng.standard_normal(n) * spread * 2.0 ** (t / 2)), -largest, largest) + largest
        for t, n in enumerate(sizes)
    ]
    counts = [np.bincount(part.astype(np.int64), minlength=2 * largest + 1) for part in parts]
    return np.concatenate(parts).astype(np.uint8), np.stack(counts)


CLASSES = {
    "small": (7, [10, 0, 3, 1, 500], 0.3, 0),
    "wide": (127, [3000, 3000, 40_000], 9.0, 1),
    "some lanes": (31, [70_000, 50_000, 40_000, 5000, 900], 0.2, 2),
    "long": (15, [600_000, 200_000, 90_000, 6000], 0.5, 3),
    "nearly nothing": (7, [400_000, 33_000], 0.18, 4),
    "zeros": (3, [5000, 100], 0.0, 5),
}


@for_each("name", CLASSES)
@for_each("backend", NATIVE)
def test_all_classes_at_once_are_the_same_bytes(backend, name):
    """Chosen, coded and read as one class after the other, on one thread and on two."""
    streams, counts = classes_of(*CLASSES[name])
    largest, totals, found = counts.shape[1] // 2, counts.sum(1), set()
    with use_backend("reference"):
        expected = class_streams._code(streams.copy(), counts), class_streams._class_bits(counts)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            with use_backend(backend):
                found.add((kernels.code_classes(streams.copy(), counts), kernels.class_bits(counts)))
                read, zeros = np.empty_like(streams), np.empty(len(counts), dtype=np.uint8)
                used = kernels.read_classes(memoryview(expected[0] + b"more"), totals, largest, read, zeros)
                assert used == len(expected[0])
                assert np.array_equal(read + np.repeat(zeros, totals), streams)
    finally:
        torch.set_num_threads(threads)
    assert {coded for coded, _ in found} == {expected[0]}
    assert all(bits == pytest.approx(expected[1], rel=1e-12) for _, bits in found)


@given(
    st.integers(1, 255), st.integers(1, 3000), st.sampled_from([0.05, 0.5, 3.0, 100.0]), st.integers(0, 2**32)
)  # fmt: skip
def test_one_stream_is_the_same_bytes(alphabet, count, spread, seed):
    rng = np.random.default_rng(seed)
    zero = int(rng.integers(alphabet))
    symbols = np.clip(np.rint(zero + rng.standard_normal(count) * spread), 0, alphabet - 1).astype(np.uint8)
    known = compress.Alphabet(alphabet, zero)
    coded = []
    for name in BACKENDS:
        with use_backend(name):
            coded.append(write_symbols(symbols, known))
            field = varint(len(coded[0])) + coded[0]
            assert np.array_equal(read_symbols(Reader(memoryview(field)), known, count), symbols)
    assert len(set(coded)) == 1


@for_each("coder", [compress.RAW, compress.HUFFMAN, compress.RANS])
def test_streams_of_other_encoders_are_read(backend, coder):
    """With any coder, and any number of lanes and chunks."""
    symbols, counts = classes_of(7, [20_000], 1.0, 0)
    alphabet = compress.Alphabet(15, 7)
    coding = compress.choose(compress.SymbolStatistics(alphabet, counts[0], len(symbols)), coder)
    if coder is not compress.RANS:
        coded = [compress.encode(symbols, alphabet, coding)]
    else:
        layouts = [(0, 1), (3, 2), (4, 313), (5, 3), (6, 2)]
        coded = [
            coding.head + rans.encode(symbols, coding.table, coding.precision, 1.0, at=at).tobytes() for at in layouts
        ]
    for each in coded:
        field = varint(len(each)) + each
        assert np.array_equal(read_symbols(Reader(memoryview(field)), alphabet, len(symbols)), symbols)


def test_damaged_classes_are_refused_by_all():
    streams, counts = classes_of(31, [4000, 2500, 900], 0.6, 7)
    totals, rng = counts.sum(1), np.random.default_rng(0)
    with use_backend("reference"):
        whole = class_streams._code(streams.copy(), counts)
    refused = 0
    for i in range(150):
        data = bytearray(whole[: rng.integers(len(whole))] if i % 10 == 0 else whole)
        if i % 10:
            data[int(rng.integers(60 if i % 2 else len(data)))] = int(rng.integers(256))
        outcomes, classes = set(), SimpleNamespace(classes=len(counts), counts=lambda _: totals)
        for name in BACKENDS if i % 15 == 0 else NATIVE or BACKENDS:
            with use_backend(name):
                try:
                    reader = Reader(memoryview(bytes(data)))
                    found = class_streams.read_streams(reader, classes, len(streams), 31)
                    outcomes.add((reader.position, found.symbols.tobytes(), found.zeros.tobytes()))
                except FrameError:
                    outcomes.add("refused")
        assert len(outcomes) == 1
        refused += outcomes == {"refused"}
    assert refused > 60


@for_each("backend", NATIVE)
@for_each("error", [0.5, 0.06, 0.003, 1e-6])
@for_each("content", ["gradient", "noise", "few values", "largest", "zeros beside"])
def test_a_grid_is_found_as_python_finds_it(backend, content, error):
    """To the bit, also where the error cannot be met."""
    x = {
        "gradient": gradient(20_000, 1),
        "noise": torch.randn(5000, generator=torch.Generator().manual_seed(0)),
        "few values": torch.tensor([-2.0, 0.0, 0.0, 1.0, 1.0, 3.0]).repeat(50),
        "largest": torch.full((50,), torch.finfo(torch.float32).max),
        "zeros beside": gradient(3000, 2),
    }[content].numpy()
    found = []
    for name in ("reference", backend):
        with use_backend(name):
            curve = Curve(x, 5000 if content == "zeros beside" else 0)
            found.append(curve.find(error=error * curve.energy))
    assert found[0] == found[1]
