"""Damages valid frames in every way it can think of and decodes them: only FrameError may come of it.

    python tests/fuzz_decode.py --frames 1000000 --seed 0 [--repair-checksum] [--compare]

With --repair-checksum the damage gets past the CRC, so that the decoders themselves meet it. With --compare every
frame is decoded by the reference kernels too, and both must agree, errors included. Frame i depends on --seed and i
alone: --start goes straight to it. The frame under way is kept in a file, for the case that the process dies.
"""

from __future__ import annotations

import argparse
import collections
import functools
import mmap
import random
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import gradwire
from gradwire.frame import headers
from support.helpers import DTYPES, FLOATS, SPECS, assemble, bits, encode_into, gradient, repair, use_backend
from support.plain_coders import plain_gammas, plain_normalize, plain_rans_encode, plain_varint

MAX_ELEMENTS = 4096
LONGEST = 1 << 16
SPARSE = (
    "sbc:p=0.1", "stc:p=0.05", "stc:p=0.3,positions=rans", "topk:p=0.2,values=fp32",
    "topk:p=0.1,values=fp16,positions=rans", "topk:p=0.6", "topk:p=0.2,values=fp4",
    "topk:p=0.5,values=fp8,positions=rans", "m22:p=0.3", "m22:p=0.5,bits=5,positions=rans", "m22:p=0.1,bits=1",
)  # fmt: skip
MORE = (
    "co3:format=ue3m2b3", "gennorm:coder=rans", "co3:format=e4m3b10,coder=huffman", "terngrad:coder=raw",
    "tinyscript:levels=30", "countsketch:rows=1,p=1", "homomorphic:p=all,bits=16",
)  # fmt: skip
STRUCTURED = ((40, 30), (30, 8, 3, 3), (4096,), (9, 3, 5), (2, 2, 16, 16), (60, 60))
HOMOMORPHIC = ("homomorphic:p=all", "homomorphic:p=all,bits=8", "homomorphic:p=0.01")  # with an index
GOLDEN = Path(__file__).parent / "golden/valid"


@functools.cache
def valid_frames() -> list[bytes]:
    """A thousand frames of all codecs, coders, models and dtypes, of one to a thousand entries; golden ones too."""
    frames = [path.read_bytes() for path in sorted(GOLDEN.glob("*.frame"))]
    frames = [frame for frame in frames if headers.read_header(memoryview(frame)).elements <= MAX_ELEMENTS]
    for n, spec in enumerate([*SPECS, *MORE, *SPARSE]):
        codec = gradwire.codec(spec)
        for count in (1, 9, 40, 150, 1000):
            for dtype in FLOATS:
                frames.append(codec.encode(gradient(count, n).to(dtype)))
        frames.append(codec.encode(torch.zeros(50)))
        frames.append(codec.encode(gradient(100).masked_fill(torch.arange(100) % 3 > 0, 0).reshape(2, 5, 10)))
        frames.append(encode_into(codec, gradient(300, n), segments=[100, 1, 149, 50]))
    for dtype in DTYPES:
        frames.append(gradwire.codec("none").encode((gradient(30) * 1e4).to(dtype)))
    for shape in STRUCTURED:
        numbers = gradient(int(np.prod(shape)), 1).reshape(shape)
        numbers = (
            numbers + 3e-3 * numbers.flatten(1).sign()[:, :1].reshape(-1, *[1] * (len(shape) - 1))
            if len(shape) > 1
            else numbers
        )
        frames += [gradwire.codec("structured").encode(numbers.to(dtype)) for dtype in FLOATS]
    frames += [few_of_many(spec, run) for spec in HOMOMORPHIC for run in (1, 16)]
    frames += [several_lanes(lane_bits, chunks) for lane_bits in range(7) for chunks in (1, 2, 4)]
    return frames


def few_of_many(spec: str, run: int) -> bytes:
    """Of 4096 entries, twelve runs: what homomorphic frames have an index for."""
    tensor = gradient(MAX_ELEMENTS)
    here = torch.zeros(MAX_ELEMENTS // run, dtype=torch.bool)
    here[:: MAX_ELEMENTS // run // 12] = True
    return gradwire.codec(spec).encode(tensor * here.repeat_interleave(run))


def several_lanes(lane_bits: int, chunks: int) -> bytes:
    """An rANS frame with more lanes and chunks than an encoder would choose."""

    count, precision = 64 * chunks - 3, 8 + lane_bits
    frequencies = plain_normalize([1, 3, 9, 20, 50, 100, 50, 20, 9, 3, 1], precision)
    p = np.array(frequencies) / 2**precision
    symbols = np.random.default_rng(lane_bits).choice(11, size=count, p=p).tolist()
    chunk_symbols = [symbols[i : i + 64] for i in range(0, count, 64)]
    parts = [plain_rans_encode(s, frequencies, precision, 1 << lane_bits) for s in chunk_symbols]
    lengths = b"".join(len(p).to_bytes(4, "little") for p in parts[:-1])
    layout = bytes([lane_bits | 128, chunks]) + lengths if chunks > 1 else bytes([lane_bits])
    head = bytes([0, 0x80, 0x3F, 3 | 2 << 2 | precision << 4])  # fp4, step 1, rans with a histogram
    return assemble(head + plain_gammas(frequencies[:5] + frequencies[6:]) + layout + b"".join(parts), (count,), 1)


def mutate(frames: list[bytes], rng: random.Random) -> bytes:
    frame = bytearray(rng.choice(frames))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(MUTATIONS)(frame, frames, rng)
    return bytes(frame[:LONGEST])


def cut(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    del frame[rng.randrange(len(frame) + 1) :]


def flip(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8)) if frame else 0):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)


def overwrite(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    if frame:
        frame[rng.randrange(len(frame))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def overwrite_front(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    """Header, side information, model and layout stand in the first bytes."""
    if frame:
        frame[rng.randrange(min(40, len(frame)))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def insert(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(frame) + 1)
    frame[at:at] = rng.randbytes(rng.choice((1, 2, 9)))


def remove(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(frame) + 1)
    del frame[at : at + rng.choice((1, 2, 9))]


def splice(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    other = rng.choice(frames)
    at = rng.randrange(len(frame) + 1)
    frame[at:] = other[min(len(other), at if rng.random() < 0.5 else rng.randrange(len(other))) :]


def resize(frame: bytearray, frames: list[bytes], rng: random.Random) -> None:
    """Another shape, with as many dimensions or fewer, before the same payload."""
    try:
        header = gradwire.frame.headers.read_header(memoryview(bytes(frame)))
    except gradwire.FrameError:
        return
    shape = tuple(rng.choice((0, 1, 2, 100, 2**20, 2**40, d, d + 1, max(0, d - 1))) for d in header.shape)
    if rng.random() < 0.2:
        shape = shape[: rng.randrange(len(shape) + 1)]
    frame[:] = assemble(bytes(frame[header.length :]), shape, header.codec, header.dtype, header.flags)


MUTATIONS = (cut, flip, flip, overwrite, overwrite_front, overwrite_front, insert, remove, splice, resize)


def repaired(frame: bytes) -> bytes:
    """With the payload length that fits, where the header can be read at all, and a right checksum."""
    try:
        header = gradwire.frame.headers.read_header(memoryview(frame))
        old = plain_varint(header.payload_length)
        frame = frame[:9] + plain_varint(len(frame) - header.length) + frame[9 + len(old) :]
    except gradwire.FrameError:
        pass
    return repair(frame) if len(frame) >= 9 else frame


def outcome(frame: bytes) -> tuple[str, bytes]:
    """A word for what came of it, and the decoded bits."""
    try:
        decoded = gradwire.decode(frame, max_elements=MAX_ELEMENTS)
    except gradwire.FrameError as error:
        return "FrameError: " + re.sub(r"0x\w+|\d+", "#", re.split("[:(]", str(error))[0]).strip(), b""
    assert decoded.numel() <= MAX_ELEMENTS
    return "decoded", bits(decoded)


def disagree(a: tuple[str, bytes], b: tuple[str, bytes]) -> bool:
    """Messages may differ, results may not."""
    return (a[0] == "decoded") != (b[0] == "decoded") or a[1] != b[1]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    frames = valid_frames()
    for frame in frames:
        assert outcome(frame)[0] == "decoded"
    counts: collections.Counter[str] = collections.Counter()
    failures, start, before = 0, time.perf_counter(), peak_mb()
    with tempfile.NamedTemporaryFile(prefix="gradwire-fuzz-", suffix=".frame") as file:
        file.truncate(LONGEST + 64)
        current = mmap.mmap(file.fileno(), 0)
        print(f"{len(frames)} valid frames; the one under way is in {file.name}")
        for i in range(options.start, options.start + options.frames):
            frame = mutate(frames, random.Random(f"{options.seed} {i}"))
            if options.repair_checksum:
                frame = repaired(frame)
            current[: 8 + len(frame)] = len(frame).to_bytes(8, "little") + frame
            try:
                result = outcome(frame)
                if options.compare:
                    with use_backend("reference"):
                        expected = outcome(frame)
                    if disagree(result, expected):
                        raise AssertionError(f"{result[0]}, but the reference says {expected[0]}")
                counts[result[0]] += 1
            except Exception as error:  # whatever it is, it is a failure
                failures += 1
                counts[f"FAILURE: {type(error).__name__}: {error}"[:100]] += 1
                path = options.save / f"failure-{options.seed}-{i}.frame"
                path.write_bytes(frame)
                print(f"frame {i}: {type(error).__name__}: {error}; saved as {path}")
            if (i + 1) % 10_000 == 0 and sys.stderr.isatty():
                print(f"\r{i + 1 - options.start} frames, {failures} failures", end="", file=sys.stderr)
    seconds = time.perf_counter() - start
    for what, count in counts.most_common():
        print(f"{count:10d}  {what}")
    growth = peak_mb() - before
    print(
        f"{options.frames} frames, {failures} failures, {options.frames / max(seconds, 1e-9):.0f} frames/s, "
        f"peak memory {peak_mb():.0f} MB, {growth:.0f} MB more than before"
    )
    if growth > options.max_growth_mb:
        print(f"FAILURE: memory grew by more than {options.max_growth_mb} MB")
        failures += 1
    return 1 if failures else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first frame")
    parser.add_argument("--repair-checksum", action="store_true", help="make length and checksum right again")
    parser.add_argument("--compare", action="store_true", help="decode with the reference kernels too")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for frames that fail")
    parser.add_argument("--max-growth-mb", type=float, default=200, help="how much the peak memory may grow")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
