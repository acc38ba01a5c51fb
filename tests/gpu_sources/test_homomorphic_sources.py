"""The CUDA C++ of the homomorphic code and of the choice of entries, run on the CPU, against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import by_largest
from gradwire.homomorphic.plan import LANES, Plan, choose, choose_index
from gradwire.kernels import dispatch
from gradwire.kernels.cuda import homomorphic as cuda
from gradwire.kernels.cuda import sparse as cuda_sparse
from gradwire.kernels.reference import homomorphic as reference
from gradwire.kernels.reference import sparse as reference_sparse
from support.cases import for_each
from support.cuda_on_cpu import cuda_on_cpu
from support.helpers import check_same

SIZES = (1, 2, 31, 33, 1023, 4095, 20003)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the test, the dispatcher takes the kernels for GPUs for tensors on the CPU."""
    for family in ("homomorphic", "sparse"):
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS, ("cpu", family), f"gradwire.kernels.cuda.{family}")
    dispatch.bind(vars(kernels))
    yield
    monkeypatch.undo()
    dispatch.bind(vars(kernels))


def entries(kind: str, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + count)
    x = torch.randn(count, generator=generator)
    sparse = torch.where(torch.rand(count, generator=generator) < 0.05, x, 0.0)
    return {
        "dense": x,
        "sparse": sparse,
        "zeros": torch.zeros(count),
        "minus zeros": torch.full((count,), -0.0),
        "constant": torch.full((count,), -0.75),
        "few magnitudes": x.round(),
        "subnormal": x * 1e-40,
        "tiny": x * 1e-36,
        "huge": x * 3e37,
        "heavy tails": x**9,
        "ends": torch.cat([x[:1], torch.zeros(max(0, count - 2)), x[:1]])[:count],
    }[kind]


KINDS = ("dense", "sparse", "zeros", "minus zeros", "constant", "few magnitudes", "subnormal", "tiny", "huge",
         "heavy tails", "ends")  # fmt: skip


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((1,), math.nan), x])[1:]


# ── entries and words ─────────────────────────────────────────────────────────────────────────────


def check_quantized(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, step: float, most: int,
                    bits: int, seed: int | None, shift: bool = False) -> None:  # fmt: skip
    results = []
    for module in (reference, cuda):
        after = torch.full((gradient.numel() + shift,), math.nan)[int(shift) :]
        results.append((*module.quantize_all(gradient, memory, after, decay, step, most, bits, seed), after))
    (at, words, exponent, squares, after), (at_, words_, exponent_, squares_, after_) = results
    assert exponent == exponent_
    if exponent == 255:
        assert not len(at_) and not len(words_) and squares_ == 0
        return
    check_same(at, at_)
    check_same(words, words_)
    check_same(after, after_)
    assert squares_ == pytest.approx(squares, rel=1e-12, abs=1e-300)
    without = cuda.quantize_all(gradient, memory, None, decay, step, most, bits, seed)
    check_same(words, without[1])
    again = cuda.quantize_all(gradient, memory, None, decay, step, most, bits, seed)
    assert without[3] == again[3] == squares_


@for_each("kind", KINDS)
def test_entries_become_words(kind: str) -> None:
    for n, count in enumerate(SIZES):
        gradient, bits = entries(kind, count), (32, 16, 8, 4)[n % 4]
        grid = by_largest(129 if kind != "huge" else 253, bits, 3)
        memory = entries("dense", count, 1) * 0.3
        check_quantized(gradient, memory, 0.9, grid.step, grid.most, bits, None)
        check_quantized(gradient, None, 1.0, grid.step / 5, grid.most, bits, 2**63 + 12345)
        check_quantized(
            misaligned(gradient), misaligned(memory), 0.5, min(grid.step * 7, 1e38), grid.most, bits, 7, shift=True
        )


@for_each("bits", (32, 16, 8, 4))
def test_every_number_of_bits_at_every_end(bits: int) -> None:
    grid = by_largest(128, bits, 2)
    for count in (*range(1, 18), 1024, 1025, 1032, 2047, 8192):
        check_quantized(entries("dense", count), entries("sparse", count), 1.0, grid.step, grid.most, bits, None)


def test_gradients_and_memories_that_are_not_finite() -> None:
    for value in (math.inf, -math.inf, math.nan):
        for place in (0, 1024, 2999):
            gradient, memory = entries("dense", 3000), entries("dense", 3000, 1)
            spoiled = gradient.clone()
            spoiled[place] = value
            check_quantized(spoiled, memory, 1.0, 0.1, 1000, 32, None)
            check_quantized(spoiled, None, 1.0, 0.1, 1000, 32, None)
            memory[place] = value
            check_quantized(gradient, memory, 1.0, 0.1, 1000, 32, None)
            gradient[place] = 0.0  # then it does not matter
            if not math.isnan(value):
                continue
            assert cuda.quantize_all(gradient, memory, None, 1.0, 0.1, 1000, 32)[2] != 255


def test_sums_that_overflow_are_limited() -> None:
    gradient, memory = torch.full((100,), 3e38), torch.full((100,), 3e38)
    check_quantized(gradient, memory, 1.0, 2.0**100, 2**27, 32, None)


@for_each("kind", KINDS)
def test_values_on_a_grid(kind: str) -> None:
    for seed in (None, 0, 99):
        for most in (1, 127, 2**31 - 1):
            given = entries(kind, 4095), 0.01, most, seed
            for a, b in zip(reference.quantize_values(*given), cuda.quantize_values(*given), strict=True):
                check_same(a, b)


@for_each("bits", (32, 16, 8, 4))
def test_words_become_entries(bits: int) -> None:
    fields = 32 // bits
    for count in (1, 7, 1000, 4099):
        words = -(-count // fields)
        chosen = torch.randperm(words)[: max(1, words // 2)].sort().values
        chosen[-1] = words - 1  # whose last entries may not be there
        values = torch.from_numpy(np.random.default_rng(count).integers(-(2**31), 2**31, len(chosen)).astype(np.int32))
        outs = torch.full((count,), math.nan), misaligned(torch.full((count,), math.nan))
        for out, module in zip(outs, (reference, cuda), strict=True):
            module.put_words(out, chosen, values, bits, 0.1 / 3)
        check_same(*outs)


# ── index and sketch ──────────────────────────────────────────────────────────────────────────────


def positions_of(words: int, density: float, seed: int, run: int = 1) -> torch.Tensor:
    chosen = np.random.default_rng(seed).random(-(-words // run)) < density
    return torch.from_numpy(np.flatnonzero(np.repeat(chosen, run)[:words]))


def words_of(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed + 10**6).integers(-(2**31), 2**31, count).astype(np.int32))


@for_each("words, density, run", ((1, 1.0, 1), (31, 0.5, 1), (33, 1.0, 1), (1025, 0.3, 4), (5000, 0.05, 1),
                                  (40001, 0.01, 16), (40001, 0.0, 1), (4097, 1.0, 1)))  # fmt: skip
def test_indexes(words: int, density: float, run: int) -> None:
    positions = positions_of(words, density, 1, run)
    assert cuda.count_blocks(positions, LANES) == reference.count_blocks(positions, LANES)
    union = torch.unique(torch.cat([positions, positions_of(words, density, 2, run)]))
    for lanes in LANES:
        blocks = -(-words // lanes)
        bitmap = cuda.index_bitmap(positions, lanes, blocks)
        check_same(bitmap, reference.index_bitmap(positions, lanes, blocks))
        assert cuda.count_bits(bitmap) == reference.count_bits(bitmap)
        for probes, length in ((1, 1), (3, 7), (24, 1000)):
            built = cuda.bloom_build(bitmap, length, probes, 77)
            check_same(built, reference.bloom_build(bitmap, length, probes, 77))
            queried = reference.bloom_query(built, blocks, probes, 77)
            check_same(cuda.bloom_query(built, blocks, probes, 77), queried)
        for marked in (reference.index_bitmap(union, lanes, blocks), bitmap, torch.full_like(bitmap, -1),
                       torch.zeros_like(bitmap)):  # fmt: skip
            given = marked, words, lanes, positions, words_of(len(positions), 3)
            for a, b in zip(reference.align_words(*given), cuda.align_words(*given), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_positions_out_of_order_are_found() -> None:
    for given in ([], [0], [-1], [5], [0, 0], [1, 0], [0, 1, 4], [0, 1, 5], [-3, 2]):
        positions = torch.tensor(given, dtype=torch.int64)
        assert cuda.are_ascending(positions, 5) == reference.are_ascending(positions, 5), given
    many = torch.arange(10000)
    assert cuda.are_ascending(many, 10000) and not cuda.are_ascending(many, 9999)
    many[7777] = 7776
    assert not cuda.are_ascending(many, 10000)


def check_peeled(bitmap: torch.Tensor, sketch: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, bool]:
    given = bitmap, sketch, plan.words, plan.lanes, plan.segments, plan.segment_log, plan.seed
    kept = sketch.clone()
    *expected, consistent = reference.peel(*given)
    *found, consistent_ = cuda.peel(*given)
    assert consistent_ == consistent
    check_same(sketch, kept)  # it is not changed
    check_same(expected[2], found[2])
    if consistent:
        check_same(expected[0], found[0])
        check_same(expected[1], found[1])
    return found[2], consistent


@for_each("words, density, run", ((1, 1.0, 1), (50, 0.5, 1), (3000, 0.05, 1), (20000, 0.1, 1), (20001, 0.1, 16),
                                  (30000, 0.05, 4), (4000, 0.0, 1)))  # fmt: skip
def test_sketches_and_peeling(words: int, density: float, run: int) -> None:
    positions = positions_of(words, density, 5, run)
    values, marked = words_of(len(positions), 6), code.blocks(positions, words)
    for lanes in LANES:
        for room, seed in ((1.0, 1), (1.5, 2), (0.6, 3)):  # the last is too small, and blocks are left
            plan = choose(words, {lanes: max(1, int(room * marked[lanes]))}, seed)
            if plan.index == "dense":
                plan = Plan(words, lanes, "bitmap", -(-words // (32 * lanes)), 0, 8, 5, seed)
            sketch = cuda.sketch_words(positions, values, lanes, plan.segments, plan.segment_log, seed)
            check_same(sketch, reference.sketch_words(positions, values, lanes, plan.segments, plan.segment_log, seed))
            bitmap = reference.index_bitmap(positions, lanes, plan.blocks)
            check_peeled(bitmap, sketch, plan)


def test_what_does_not_belong_together() -> None:
    words = 4001
    positions = positions_of(words, 0.05, 1)
    values, plan = words_of(len(positions), 1), Plan(words, 16, "bitmap", 8, 0, 5, 6, 9)
    index, sketch = code.encode(plan, positions, values)
    assert check_peeled(index, sketch, plan)[1]
    for bit in (0, 1, 5, 31):
        damaged = index.clone()
        damaged[0] ^= 1 << bit if bit < 31 else -(2**31)
        check_peeled(damaged, sketch, plan)
    for place in (0, 100, len(sketch) - 1):
        damaged = sketch.clone()
        damaged[place] += 1
        check_peeled(index, damaged, plan)
    check_peeled(torch.full_like(index, -1), sketch, plan)
    left, consistent = check_peeled(torch.zeros_like(index), sketch, plan)
    assert not consistent and not len(left)
    # Words beyond the last.
    beyond = torch.tensor([words + 3])
    more = cuda.sketch_words(beyond, words_of(1, 1), 16, plan.segments, plan.segment_log, plan.seed)
    bitmap = reference.index_bitmap(beyond, 16, plan.blocks)
    assert not check_peeled(bitmap, more, plan)[1]


# ── the choice of entries ─────────────────────────────────────────────────────────────────────────


@for_each("kind", KINDS)
def test_the_largest_entries(kind: str) -> None:
    for count in (1, 2, 33, 4095):
        gradient, memory = entries(kind, count), entries(kind, count, 3)
        for wanted in {1, count // 20, count - 1, count, None} - {0}:
            check_selected(gradient, memory, wanted, 1 if wanted is None or wanted % 2 else 0x3F000000)
        check_selected(gradient, None, max(1, count // 2), 0)
        check_selected(misaligned(gradient), misaligned(memory), max(1, count // 3), 1)
    check_selected(entries(kind, 20003), None, 1000, 1)


def check_selected(gradient: torch.Tensor, memory: torch.Tensor | None, wanted: int | None, low: int) -> None:
    results = []
    for module in (reference_sparse, cuda_sparse):
        after = misaligned(torch.full_like(gradient, math.nan))
        results.append((*module.select(gradient, memory, after, 0.9, wanted, low), after))
    (done, *expected), (done_, *found) = results
    assert done == done_
    for a, b in zip(expected if done else expected[:2], found, strict=False):
        check_same(a, b)
    check_same(cuda_sparse.select(gradient, memory, None, 0.9, wanted, low)[1], expected[0])
    if memory is not None:
        in_place = memory.clone()
        cuda_sparse.select(gradient, in_place, in_place, 0.9, wanted, low)
        check_same(in_place, expected[2] if done else memory)


def test_nothing_is_selected_of_what_is_not_finite() -> None:
    for value in (math.inf, math.nan):
        for place in (0, 1500, 4094):
            gradient, memory = entries("dense", 4095), entries("dense", 4095, 1)
            memory[place] = value
            check_selected(gradient, memory, 100, 1)
            check_selected(memory, None, 100, 1)


# ── through the dispatcher ────────────────────────────────────────────────────────────────────────


def test_a_codec_runs_on_gpus_with_a_compiler() -> None:
    device, codec = torch.device("cuda"), gradwire.codec("homomorphic")
    assert codec.runs_on(device)
    assert not gradwire.codec("topk").runs_on(device)  # positions are coded on the CPU


@pytest.mark.usefixtures("dispatched")
def test_frames_are_the_same() -> None:
    for spec in ("homomorphic:p=0.05", "homomorphic:p=all", "homomorphic:p=all,bits=8", "homomorphic:p=0.1,bits=4"):
        for kind in ("sparse", "few magnitudes"):
            gradient, memory = entries(kind, 20003), entries("dense", 20003, 1)
            outs = []
            for backend in ("best", "reference"):
                codec, left = gradwire.codec(spec), memory.clone()
                out = torch.zeros(codec.max_frame_bytes(gradient), dtype=torch.uint8)
                if backend == "reference":
                    with kernels.use("reference"):
                        length = codec.encode_into(gradient, out, residual=left, decay=0.9)
                else:
                    length = codec.encode_into(gradient, out, residual=left, decay=0.9)
                outs.append((bytes(out[:length].numpy()), left))
            assert outs[0][0] == outs[1][0]
            check_same(outs[0][1], outs[1][1])


@pytest.mark.usefixtures("dispatched")
def test_sums_without_a_sketch() -> None:
    words, workers = 30000, [positions_of(30000, 0.03, seed) for seed in range(3)]
    marked = code.blocks(torch.unique(torch.cat(workers)), words)
    for index in ("bitmap", "bloom"):
        plan = choose_index(
            words, marked, {lanes: n * (1 if index == "bloom" else 99) for lanes, n in marked.items()}, 1
        )
        ored = torch.zeros(plan.index_words, dtype=torch.int32)
        for positions in workers:
            ored |= code.index_of(plan, positions)
        total = torch.zeros(words, dtype=torch.int32)
        sums, everywhere = 0, None
        for seed, positions in enumerate(workers):
            values = words_of(len(positions), seed)
            total[positions] += values
            everywhere, aligned = code.align(plan, ored, positions, values)
            sums = sums + aligned
        got = torch.zeros(words, dtype=torch.int32)
        got[everywhere] = sums
        check_same(got, total)
