"""The native kernels on several threads: the bytes and the values of one thread, whatever is in the data.

Threads are started only for work that is worth it (native/threads.h), so that tensors here have a million entries.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire import FrameError, codecs, kernels
from gradwire.models.integer_frequencies import normalize
from gradwire.small_float_formats import PRESETS
from support.cases import for_each
from support.helpers import LEVEL_SPECS, bits, gradient, native

pytestmark = pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)")
SETS = native.instruction_sets() if native else []
SEVERAL = [2, 3, 4, 7]
FEW = settings(max_examples=max(4, settings().max_examples // 5))
FP4, STEP = PRESETS["fp4"], 0.01
VALUES = torch.from_numpy(FP4.levels.astype(np.float32)) * STEP


@pytest.fixture(autouse=True)
def best_set_and_one_thread_afterwards() -> Iterator[None]:
    yield
    native.use(SETS[-1])
    torch.set_num_threads(1)


def each_number(numbers: list[int] = SEVERAL) -> Iterator[int]:
    for threads in numbers:
        torch.set_num_threads(threads)
        yield threads


# ── frames ────────────────────────────────────────────────────────────────────────────────────────


def encoded(spec: str, grad: torch.Tensor, memory: torch.Tensor | None, in_place: bool) -> tuple[bytes, bytes]:
    """The frame, and the error memory afterwards."""
    codec = gradwire.codec(spec)
    out = torch.empty(codec.max_frame_bytes(grad), dtype=torch.uint8)
    before = None if memory is None else memory.clone()
    after = before if in_place else torch.full_like(grad, 7.0)
    length = codec.encode_into(grad, out, residual=before, residual_out=after, decay=0.9, seed=5)
    return bits(out[:length]), b"" if after is None else bits(after)


@pytest.mark.parametrize("spec", ["co3", "co3:rounding=stochastic", "co3:format=fp8", "ecq"])
@for_each("count", [1_400_003, 4_200_000])
@for_each("memory", ["none", "other", "same"])
def test_frames(spec: str, count: int, memory: str) -> None:
    grad = gradient(count)
    before = None if memory == "none" else gradient(count, 1)
    torch.set_num_threads(1)
    frame, after = encoded(spec, grad, before, memory == "same")
    decoded = codecs.decode(frame)
    total = before.clone() if before is not None else torch.ones(count)
    codecs.decode_payload(*codecs.open_frame(codecs.as_bytes(frame)), total, 0.5, accumulate=True)
    for threads in each_number():
        assert encoded(spec, grad, before, memory == "same") == (frame, after), threads
        assert bits(codecs.decode(frame)) == bits(decoded), threads
        again = before.clone() if before is not None else torch.ones(count)
        codecs.decode_payload(*codecs.open_frame(codecs.as_bytes(frame)), again, 0.5, accumulate=True)
        assert bits(again) == bits(total), threads


@for_each(
    "spec", [*LEVEL_SPECS, "qsgd", "terngrad", "sbc", "topk:p=0.2", "stc", "none", "co3:coder=raw", "co3:coder=huffman"]
)
def test_frames_of_other_recipes(spec: str) -> None:
    grad, before = gradient(1_400_003), gradient(1_400_003, 1)
    torch.set_num_threads(1)
    frame, after = encoded(spec, grad, before, False)
    decoded = codecs.decode(frame)
    for threads in each_number([2, 5]):
        assert encoded(spec, grad, before, False) == (frame, after), threads
        assert bits(codecs.decode(frame)) == bits(decoded), threads


@for_each("where", [0, 1, 2_500_000, 4_399_999])
@for_each("in_place", [False, True])
def test_frames_of_what_is_not_finite(where: int, in_place: bool) -> None:
    """Memory that is updated in place is not searched first at this size, and restored: to the same bits."""
    grad, before = gradient(4_400_000), gradient(4_400_000, 1)
    grad[where] = math.inf
    torch.set_num_threads(1)
    expected = encoded("co3", grad, before, in_place)
    for threads in each_number([2, 5]):
        assert encoded("co3", grad, before, in_place) == expected, threads


# ── chunks ────────────────────────────────────────────────────────────────────────────────────────


def frequencies(precision: int) -> np.ndarray:
    return normalize(np.array([1, 3, 6, 20, 80, 250, 80, 20, 6, 3, 1]), precision)


def coded(
    grad: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, precision: int, lane_bits: int,
    chunks: int,
) -> tuple[list[int], int, bytes]:  # fmt: skip
    size = kernels.chunk_size(len(grad), chunks)
    out = torch.empty(2 * len(grad) + (3 << lane_bits) * -(-len(grad) // size) + 64, dtype=torch.uint8)
    lengths, done = native.quantize_rans(
        grad, memory, memory_out, 0.9, STEP, FP4, VALUES, frequencies(precision), precision, lane_bits, chunks, out
    )
    return lengths, done, bits(out[: sum(lengths)])


@FEW
@given(
    count=st.integers(700_000, 1_300_000), chunks=st.one_of(st.integers(2, 12), st.integers(2, 4000)),
    lane_bits=st.integers(3, 6), precision=st.sampled_from([8, 12]), memory=st.sampled_from(["none", "other", "same"]),
    bad=st.lists(st.floats(0, 1, exclude_max=True), max_size=3), name=st.sampled_from(SETS), data=st.data(),
)  # fmt: skip
def test_chunks(count, chunks, lane_bits, precision, memory, bad, name, data):
    """The same lengths, bytes and memory, up to the first entry that is not finite, and in place no further."""
    native.use(name)
    grad, before = gradient(count), gradient(count, 1) if memory != "none" else None
    for place in bad:
        (before if before is not None and data.draw(st.booleans()) else grad)[int(place * count)] = math.nan
    results = []
    for _ in each_number([1, *SEVERAL]):
        source = None if before is None else before.clone()
        after = source if memory == "same" else torch.zeros(count)
        lengths, done, body = coded(grad, source, after, precision, lane_bits, chunks)
        results.append((lengths, done, body, bits(after if memory == "same" else after[:done])))
    assert all(r == results[0] for r in results), [r[1] for r in results]
    assert results[0][1] == count if not bad else results[0][1] < count


@for_each("bad", [(), (5,), (600_000, 1_100_001)])
@for_each("capacity", [100, 30_000, 80_000])  # of about 60,000 that would be outliers
@for_each("uneven", [False, True])  # all of them in one chunk, whose list is then too short
@for_each("in_place", [False, True])
def test_grids_and_their_outliers(bad, capacity, uneven, in_place):
    grad, before = gradient(1_300_003, scale=0.1), gradient(1_300_003, 1, scale=0.1)
    grad.clamp_(-0.3, 0.3), before.clamp_(-0.3, 0.3)
    outside = torch.arange(60_000) + 300_000 if uneven else torch.arange(60_000) * 21
    grad[outside] += 50 * grad[outside].sign()
    grad[list(bad)] = math.nan
    values = torch.arange(-7, 8, dtype=torch.float32) * 0.2
    table, out = (
        normalize(np.array([1] * 5 + [40, 80, 900, 80, 40] + [1] * 5), 12),
        torch.empty(3_000_000, dtype=torch.uint8),
    )
    results = []
    for _ in each_number([1, *SEVERAL]):
        source = before.clone()
        after = source if in_place else torch.zeros_like(grad)
        lengths, done, (positions, multiples) = native.grid_rans(
            grad, source, after, 0.9, 0.2, 0.4, values, 0.1, capacity, table, 12, 6, 9, out
        )
        after = after if in_place else after[:done]
        results.append((lengths, done, bits(out[: sum(lengths)]), bits(positions), bits(multiples), bits(after)))
    assert all(r == results[0] for r in results), [(r[1], len(r[3])) for r in results]
    assert results[0][1] < len(grad) if bad else results[0][1] == len(grad)


@FEW
@given(
    count=st.integers(3_700_000, 4_000_000), chunks=st.one_of(st.integers(2, 12), st.integers(2, 4000)),
    lane_bits=st.integers(4, 6), precision=st.sampled_from([8, 12]), damage=st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_symbols(count, chunks, lane_bits, precision, damage):
    """Of all threads the same bytes, and the same symbols and values back; a damaged chunk anywhere is an error."""
    table, size = frequencies(precision), kernels.chunk_size(count, chunks)
    symbols = np.random.default_rng(count).choice(11, size=count, p=table / table.sum()).astype(np.uint8)
    out = np.zeros(2 * count + (3 << lane_bits) * -(-count // size) + 64, dtype=np.uint8)
    lengths = native.rans_encode(symbols, size, table, precision, 1 << lane_bits, out)
    body = out[: sum(lengths)].copy()
    broken = body.copy()
    broken[sum(lengths[: int(damage * len(lengths))]) + 2] = 255  # a state out of range
    before = torch.arange(count, dtype=torch.float32)
    sums = before + VALUES[torch.from_numpy(symbols).long()]
    back, values = np.empty_like(symbols), torch.empty(count)
    for threads in each_number():
        out[:] = 0
        assert native.rans_encode(symbols, size, table, precision, 1 << lane_bits, out) == lengths, threads
        assert (out[: len(body)] == body).all(), threads
        back[:] = 99
        native.rans_decode(memoryview(body), lengths, size, table, precision, 1 << lane_bits, back)
        assert (back == symbols).all(), threads
        rest = size, table, precision, lane_bits, VALUES, values, True, before
        native.rans_dequantize(memoryview(body), lengths, *rest)
        assert bits(values) == bits(sums), threads
        with pytest.raises(FrameError):
            native.rans_dequantize(memoryview(broken), lengths, *rest)
        wrong = symbols.copy()
        wrong[int(damage * count)] = 11
        with pytest.raises(ValueError, match="symbol out of range"):
            native.rans_encode(wrong, size, table, precision, 1 << lane_bits, out)


# ── sparse ──────────────────────────────────────────────────────────────────────────────────────


@FEW
@given(
    count=st.integers(1_000_000, 1_300_000), wanted=st.sampled_from([None, 1, 999, 12_000, 200_000, 800_000]),
    low=st.sampled_from([1, 0x3C23D70A]), one_sign=st.booleans(), memory=st.sampled_from(["none", "other", "same"]),
    kind=st.sampled_from(["plain", "ties", "rising", "few"]),
    bad=st.lists(st.floats(0, 1, exclude_max=True), max_size=2),
    name=st.sampled_from(SETS),
)  # fmt: skip
def test_selection(count, wanted, low, one_sign, memory, kind, bad, name):
    """The same entries, among equals too, whatever part of the tensor they are in."""
    native.use(name)
    grad, before = gradient(count), gradient(count, 1) if memory != "none" else None
    if kind == "ties":
        grad = (grad * 20).round() / 20
        before = None if before is None else torch.zeros(count)
    elif kind == "rising":
        grad = grad * torch.linspace(0, 50, count)
    elif kind == "few":
        grad[grad.abs() < 3 * grad.std()] = 0
    for place in bad:
        grad[int(place * count)] = math.nan
    results = []
    for _ in each_number([1, *SEVERAL]):
        source = None if before is None else before.clone()
        after = source if memory == "same" else torch.zeros(count)
        done, positions, values = native.select(grad, source, after, 0.9, wanted, low, one_sign)
        after = after if memory == "same" else after[:done]
        out, total = torch.full((count,), 7.0), torch.ones(count)
        native.scatter(out, positions, values, False)
        native.scatter(total, positions, values, True)
        results.append((done, *map(bits, (positions, values, after, out, total))))
    assert all(r == results[0] for r in results), [r[0] for r in results]
    assert results[0][0] < count if bad else results[0][0] == count


# ── passes ────────────────────────────────────────────────────────────────────────────────────────


@for_each("count", [1_048_576, 3_700_001])
@for_each("bad", [None, math.nan, -math.inf])
def test_passes(count: int, bad: float | None) -> None:
    x = gradient(count + 1)[1:]
    if bad is not None:
        x[count // 3] = bad
    torch.set_num_threads(1)
    most, symbols = native.absmax(x), native.quantize(x.nan_to_num(), None, None, 0.0, STEP, FP4, VALUES, 3)
    counts = native.histogram(symbols, 11)
    assert counts.tolist() == np.bincount(symbols.numpy(), minlength=11).tolist()
    for threads in each_number():
        assert np.array(native.absmax(x)).tobytes() == np.array(most).tobytes(), threads
        assert bits(native.quantize(x.nan_to_num(), None, None, 0.0, STEP, FP4, VALUES, 3)) == bits(symbols), threads
        assert native.histogram(symbols, 11).tolist() == counts.tolist(), threads
        with pytest.raises(ValueError, match="symbol out of range"):
            native.histogram(symbols, 5)


@for_each("length", [4 << 20, (14 << 20) + 5, 16_777_217])
def test_checksums(length: int) -> None:
    data = np.random.default_rng(0).bytes(length)
    expected = zlib.crc32(data, 77)
    for threads in each_number([1, *SEVERAL]):
        assert native.crc32(memoryview(data), 77) == expected, threads


@for_each("width", range(1, 9))
def test_packed_bits(width: int) -> None:
    symbols = np.random.default_rng(width).integers(0, 1 << width, 7_400_003).astype(np.uint8)
    symbols[[0, 5_000_000, -1]] = (1 << width) - 1
    torch.set_num_threads(1)
    packed = native.pack_bits(symbols, width)
    for threads in each_number([2, 7]):
        assert native.pack_bits(symbols, width) == packed, threads
        assert (native.unpack_bits(memoryview(packed), len(symbols), width, 1 << width) == symbols).all(), threads
        for place in (0, 5_000_000, -1):
            beyond = symbols & ((1 << width) - 1 >> 1) if width > 1 else symbols * 0
            beyond[place] = (1 << width) - 1
            with pytest.raises(FrameError):
                wrong = memoryview(native.pack_bits(beyond, width))
                native.unpack_bits(wrong, len(symbols), width, (1 << width) - 1)


# ── threads ───────────────────────────────────────────────────────────────────────────────────────


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def lasting_tasks() -> int:
    """Without those that have ended, even been joined, and that the kernel still lists for a moment."""
    fewest, since = tasks(), time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.01)
        now = tasks()
        if now < fewest:
            fewest, since = now, time.monotonic()
    return fewest


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_start_for_the_work_and_end_with_it() -> None:
    grad = gradient(2_000_000)
    torch.set_num_threads(4)
    coded(grad, None, None, 8, 6, 40)  # from here on torch's own threads are as many as they will be
    before, most, over = lasting_tasks(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, tasks())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(500):
        coded(grad, None, None, 8, 6, 40)
        if most > before + 1:
            break
    over.set()
    watcher.join()
    assert most > before + 1
    deadline = time.monotonic() + 10  # on a busy machine the last of them is listed for longer
    while tasks() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tasks() <= before
    small = 100_000  # not worth a thread, nor what starting it would cost
    expected = coded(grad[:small], None, None, 8, 6, 40)
    torch.set_num_threads(1)
    assert coded(grad[:small], None, None, 8, 6, 40) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """In the child nothing of torch may run on several threads: those of its OpenMP are gone, and it waits for them."""
    table, symbols = frequencies(8), np.arange(2_000_000, dtype=np.uint8) % 11
    out = np.empty(2 * len(symbols) + 10_000, dtype=np.uint8)
    torch.set_num_threads(3)
    lengths = native.rans_encode(symbols, 100_032, table, 8, 64, out)
    expected = out[: sum(lengths)].tobytes()
    child = os.fork()
    if not child:
        signal.alarm(60)
        out[:] = 0
        again = native.rans_encode(symbols, 100_032, table, 8, 64, out)
        os._exit(0 if again == lengths and out[: sum(lengths)].tobytes() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forks_while_codecs_run() -> None:
    """What other threads hold at that moment, nobody gives back in the child: it must not wait for it."""
    grad = gradient(60_000)
    frames = {spec: gradwire.codec(spec).encode(grad) for spec in ("co3", "topk:p=0.2", "stc", "qsgd", "homomorphic")}
    decoded = {spec: bits(codecs.decode(frame)) for spec, frame in frames.items()}
    torch.set_num_threads(1)  # of torch's OpenMP nothing is left in a child
    ended = threading.Event()

    def keep_coding(spec: str) -> None:
        codec = gradwire.codec(spec)
        while not ended.is_set():
            codecs.decode(codec.encode(grad))

    threads = [threading.Thread(target=keep_coding, args=(spec,)) for spec in ("topk:p=0.2", "stc")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            child = os.fork()
            if not child:
                signal.alarm(60)
                good = all(bits(codecs.decode(gradwire.codec(s).encode(grad))) == decoded[s] for s in frames)
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()
