"""Hostile frames: a short one takes little more memory than its tensor, and not much time; and blocks change no bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gradwire
from fuzz_amplification import HONEST, NAMES, honest_frame
from gradwire import FrameError, codecs
from gradwire.compress import positions
from gradwire.convert import blocks, level_buckets, segments, sparse
from gradwire.frame import headers
from gradwire.kernels.reference import levels as reference_levels
from support.decoding_cost import can_measure
from support.fresh_process import FreshProcess, fresh_process
from support.helpers import NO_NATIVE, assemble, bits, check_same, gradient
from support.hostile_frames import MAKERS, make
from support.plain_coders import plain_varint
from support.plain_decoder import plain_decode

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
MANY = 1 << 19  # elements
MEGABYTE = 1 << 20
measured = pytest.mark.skipif(not can_measure(), reason="this system does not tell the peak of a process's memory")


def decoded(frame: bytes) -> torch.Tensor | None:
    try:
        return gradwire.decode(frame, max_elements=2 * MANY)
    except FrameError:
        return None


def elements(name: str) -> int:
    """How many a frame of this name has: fewer if it has a segment for each of them, which takes a microsecond."""
    return MANY >> 4 if name.endswith("-segments") else MANY


@pytest.fixture(scope="module")
def fresh() -> Iterator[FreshProcess]:
    with fresh_process() as process:
        yield process


def check_frame(fresh: FreshProcess, frame: bytes, tensor: int) -> None:
    """At most 1.5 times the tensor and 1 MB."""
    assert fresh.decode(frame, 2 * MANY).memory <= 1.5 * tensor + MEGABYTE


@measured
@pytest.mark.skipif(NO_NATIVE, reason="the reference decodes symbol by symbol: this would take minutes")
def test_short_frames_that_stand_for_large_tensors(fresh: FreshProcess) -> None:
    """Those that scripts/make_hostile.py has made: each is far shorter than its tensor."""
    paths = sorted((GOLDEN / "hostile").glob("*.frame"))
    assert len(paths) > 20
    for path in paths:
        frame = path.read_bytes()
        header = headers.read_header(memoryview(frame))
        assert 1000 * len(frame) < header.elements * header.dtype.itemsize
        check_frame(fresh, frame, header.elements * header.dtype.itemsize)


@measured
@pytest.mark.thorough
@pytest.mark.skipif(NO_NATIVE, reason="the reference decodes symbol by symbol: this would take minutes")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_by_the_tensor(fresh: FreshProcess, name: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        count = elements(name)
        check_frame(fresh, make(name, count, dtype, random.Random(seed)), count * dtype.itemsize)


@measured
@pytest.mark.thorough
@pytest.mark.skipif(NO_NATIVE, reason="the reference decodes symbol by symbol: this would take minutes")
@pytest.mark.parametrize("name", MAKERS)
def test_memory_is_bounded_where_frames_are_added_up(fresh: FreshProcess, name: str) -> None:
    """As in a mean of several ranks, and on a Flower server."""
    count = elements(name)
    frame = make(name, count, torch.float32, random.Random(1))
    assert fresh.add(frame).memory <= 0.5 * 4 * count + MEGABYTE  # beside the sum, which was there


@measured
def test_sixty_bytes_of_count_sketch_cost_no_more_than_their_tensor(fresh: FreshProcess) -> None:
    """They took 40 bytes and 800 ns an element: 4 GB and 80 seconds for a hundred million."""
    frame = make("sketch-tiny", MANY)
    assert len(frame) <= 60
    check_frame(fresh, frame, 4 * MANY)
    if not NO_NATIVE:
        plain = gradwire.codec("none").encode(torch.zeros(MANY))
        ratios = []
        while len(ratios) < 8 and min(ratios, default=99) > 40:
            ratios.append(fresh.decode(frame, MANY).seconds / fresh.decode(plain, MANY).seconds)
        assert min(ratios) <= 40  # 8 as a rule; it was 200


@measured
def test_a_sparse_frame_of_27_bytes_costs_no_more_than_its_tensor(fresh: FreshProcess) -> None:
    """It took 17 bytes an element beside the tensor, for gaps, classes and positions."""
    frame = make("sparse-everything-in-27-bytes", MANY)
    assert len(frame) <= 27
    check_frame(fresh, frame, 4 * MANY)
    check_same(gradwire.decode(frame), torch.ones(MANY))


@measured
@pytest.mark.skipif(NO_NATIVE, reason="the reference decodes symbol by symbol: this would take minutes")
def test_looking_into_a_short_frame_takes_no_more_than_decoding_it(fresh: FreshProcess) -> None:
    """`gradwire inspect` makes no tensor, but it looks at the symbols; positions took it 8.7 bytes an element."""
    for path in sorted((GOLDEN / "hostile").glob("*.frame")):
        frame = path.read_bytes()
        header = headers.read_header(memoryview(frame))
        assert fresh.inspect(frame).memory <= 1.5 * header.elements * header.dtype.itemsize + MEGABYTE, path.name


@measured
@pytest.mark.skipif(NO_NATIVE, reason="the reference would take a minute")
def test_a_short_update_costs_no_more_than_the_model_once_more(fresh: FreshProcess) -> None:
    """On a Flower server 63 bytes took 72 seconds and a gigabyte beyond the model."""
    data = plain_varint(1) + plain_varint(2) + plain_varint(0) + make("sketch-tiny", MANY)
    assert len(data) <= 63
    assert fresh.update(data, MANY).memory <= 1.5 * 4 * MANY + MEGABYTE


def fuzz(setup: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A short run of tests/fuzz_amplification.py, in a process of its own for the sake of its memory figure."""
    code = f"import sys, fuzz_amplification as f; {setup}; sys.exit(f.run(f.parse({list(options)})))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, timeout=900, check=False
    )


@measured
@pytest.mark.thorough
@pytest.mark.skipif(NO_NATIVE, reason="the reference decodes symbol by symbol: this would take minutes")
def test_hostile_frames_take_no_longer_than_four_honest_ones() -> None:
    """Made ones and damaged ones of every codec, in every way to decode: time as well as memory."""
    done = fuzz("pass", "--frames", "400", "--seed", "11")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400 frames, 0 beyond the bounds" in done.stdout
    assert done.stdout.count("× honest |") == len(NAMES), done.stdout  # each codec has been decoded


def test_there_is_an_honest_frame_of_every_dtype() -> None:
    """A hostile header may name any; with bool the fuzzer ended once, after 22,000 frames."""
    for spec in (specs[0] for specs in HONEST.values()):
        for dtype in headers.DTYPES:
            frame = honest_frame(spec.format(1024), dtype, 1024, 1, segmented=False)
            assert headers.read_header(memoryview(frame)).dtype == dtype


@measured
@pytest.mark.thorough
@pytest.mark.parametrize(("bound", "found"), [("MOST_TIME", "× time"), ("MOST_MEMORY", "× memory")])
def test_frames_beyond_the_bounds_are_noticed(bound: str, found: str) -> None:
    done = fuzz(f"f.{bound} = -1e9", "--frames", "3", "--seed", "11")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BEYOND" in done.stdout and found in done.stdout


# ── limits that no encoder reaches ────────────────────────────────────────────────────────────────


def test_a_sketch_has_neither_too_few_cells_nor_too_many() -> None:
    with pytest.raises(FrameError, match="invalid sketch"):
        gradwire.decode(make("sketch-larger-than-its-tensor", 1000))
    too_small = assemble(make_sketch(1, 1), (2**21 + 1,), headers.SKETCH)
    with pytest.raises(FrameError, match="invalid sketch"):
        gradwire.decode(too_small)
    gradwire.decode(assemble(make_sketch(7, 1), (3,), headers.SKETCH))  # of a column, whatever the tensor
    x = gradient(5000)
    for spec in ("ratio=1000000,rows=7", "ratio=1,rows=7", "ratio=1,rows=1,p=1"):
        gradwire.decode(gradwire.codec(f"countsketch:{spec}").encode(x))


def make_sketch(rows: int, columns: int) -> bytes:
    front = bytes([rows]) + plain_varint(columns) + plain_varint(1) + np.float32(1).tobytes() + bytes(8)
    return front + bytes(4 * rows * columns)


def test_a_grid_lists_no_more_outliers_than_an_encoder_does() -> None:
    with pytest.raises(FrameError, match="invalid outliers"):
        gradwire.decode(make("grid-nothing-but-outliers", 1000))
    gradwire.decode(make("grid-outliers", 1000))


def test_a_homomorphic_sketch_is_not_longer_than_the_words() -> None:
    with pytest.raises(FrameError, match="longer than the words"):
        gradwire.decode(make("homomorphic-sketch-larger-than-its-tensor", 1 << 15))


# ── block by block ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few entries, so that small frames have many of them; a sparse frame of nine entries has many."""
    for module in (blocks, segments, reference_levels):
        monkeypatch.setattr(module, "BLOCK", 16)
    for module in (level_buckets, segments):
        monkeypatch.setattr(module, "MOST", 5)
    monkeypatch.setattr(level_buckets, "MANY", 3)
    monkeypatch.setattr(positions, "PART", 8)
    monkeypatch.setattr(sparse, "FEW", 0)
    monkeypatch.setattr(sparse, "SMALL_SHARE", 1000)


def check_blocks(frame: bytes) -> None:
    """Decoded, and added with a weight, a frame gives what the plain decoder gives."""
    tensor = plain_decode(frame).tensor
    check_same(gradwire.decode(frame), tensor)
    if not tensor.numel() or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        return
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    for out in (gradient(tensor.numel(), 3), gradient(tensor.numel(), 3).to(torch.bfloat16)):
        expected = out + (tensor.reshape(-1).float().to(out.dtype) * 0.25)
        codecs.decode_payload(header, payload, out, 0.25, True)
        if out.dtype == torch.float32 and header.dtype != torch.float64:
            assert bits(out + 0.0) == bits(expected + 0.0)
        else:
            largest = float(expected.abs().max())  # sums are rounded, and products before them
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02 * largest)


def test_blocks_change_no_bit_of_golden_frames(backend: str, tiny_blocks: None) -> None:
    for path in sorted((GOLDEN / "valid").glob("*.frame")):
        if path.stat().st_size < 500:
            check_blocks(path.read_bytes())


@pytest.mark.parametrize("name", MAKERS)
def test_blocks_change_no_bit_of_hostile_frames(backend: str, tiny_blocks: None, name: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        frame = make(name, 150 + seed, dtype, random.Random(seed))
        if decoded(frame) is not None:
            check_blocks(frame)
