"""Decodes hostile frames and measures what each costs: memory beside its tensor, and time beside an honest frame's.

    python tests/fuzz_amplification.py --frames 100000 --seed 0

A quarter of the frames are made to cost as much as their codec allows (support/hostile_frames.py), with random sizes,
dtypes and fields. The others are honest frames and golden ones, damaged as tests/fuzz_decode.py does it, with lengths
and checksums that are right again, so that the decoders meet the damage. Each is decoded in one of the ways that the
library has: to a new tensor, to `out`, added to a tensor as in a mean of several ranks, or onto a model as on a Flower
server. It must take no more than 1.5 times its tensor and 1 MB of memory, and no more than 4 times the CPU time of an
honest frame of its codec, dtype and size.

Memory is measured exactly (support/decoding_cost.py). Time is measured again, up to five times, where it is too long,
since a busy machine makes single measurements longer. An honest frame is the slowest of some that our encoders make of
dense tensors and of nearly empty ones (HONEST). Frame i depends on --seed and i alone: --start goes straight to it.
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import gradwire
from fuzz_decode import mutate, repaired, valid_frames
from gradwire import codecs
from gradwire.frame import headers
from support.decoding_cost import can_measure, cost_of, give_back_at_once
from support.helpers import FLOATS, encode_into, gradient
from support.hostile_frames import MAKERS, make

NAMES = ("stored", "minifloat", "cast", "grid", "levels", "sparse", "count-sketch", "homomorphic", "structured")
MOST_MEMORY, FIXED_MEMORY, MOST_TIME = 1.5, 2**20, 4.0
LIMIT = 1 << 20  # elements
WAYS = ("decode", "out", "add", "onto")
SIZES = (1 << 12, 1 << 15)  # elements of the honest frames that are timed; others are between them
SIZES_OF_SEGMENTS = (1 << 8, 1 << 11)
# Slow settings of each codec: everything is sent, the finest formats, the smallest buckets.
HONEST = {
    headers.STORED: ("none",),
    headers.MINIFLOAT: ("co3:format=fp8,coder=huffman", "co3:coder=huffman", "co3"),
    headers.CAST: ("fp16",),
    headers.GRID: ("ecq:rate=3", "ecq:rate=0.4"),
    headers.LEVELS: ("linear:levels=2,bucket=4", "orq:levels=129,bucket=258", "qsgd:coder=huffman"),
    headers.SPARSE: ("topk:k={}", "topk:k={},values=fp8", "m22:k={}", "stc:k={},positions=rans", "topk:p=0.5"),
    headers.SKETCH: ("countsketch:rows=7,p=0.5", "countsketch:rows=7,p=0.5,ratio=1"),
    headers.HOMOMORPHIC: ("homomorphic:p=all", "homomorphic:p=all,bits=4", "homomorphic:p=0.5"),
    headers.STRUCTURED: ("structured:nmse=0.001", "structured"),
}


@dataclass
class Worst:
    """The worst of all frames of one codec."""

    frames: int = 0
    decoded: int = 0
    memory: float = 0.0  # (peak − 1 MB) / tensor
    seconds: float = 0.0  # beside the honest frame's
    memory_of: str = ""
    seconds_of: str = ""
    beyond: list[str] = field(default_factory=list)


class Honest:
    """CPU seconds of the slowest honest frame of a codec, a dtype, a size and a way to decode it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, bool, bool], list[float]] = {}

    def seconds(self, header: headers.Header, way: str) -> float:
        """Return the seconds for the size of this header: measured, in proportion between two sizes and beyond them."""
        key = header.codec, header.dtype, bool(header.flags & headers.SEGMENTED), way in ("add", "onto")
        # Encoding a segment takes a hundred microseconds: with segments of one entry, fewer entries have to do.
        sizes = SIZES_OF_SEGMENTS if key[2] else SIZES
        if key not in self._known:
            self._known[key] = [_slowest(*key, count) for count in sizes]
        usual = float(np.interp(header.elements, sizes, self._known[key]))
        return usual * max(1.0, header.elements / sizes[-1])

    def exactly(self, header: headers.Header, way: str) -> float:
        """Return the seconds for just this number of elements."""
        key = header.codec, header.dtype, bool(header.flags & headers.SEGMENTED), way in ("add", "onto")
        if key[2]:
            return self.seconds(header, way)
        return max(self.seconds(header, way), _slowest(*key, header.elements))


def _slowest(codec: int, dtype: torch.dtype, segmented: bool, adds: bool, count: int) -> float:
    slowest, way = 0.0, "add" if adds else "decode"
    for spec in HONEST[codec][: 1 if segmented else None]:
        for every in (1,) if segmented else (1, 1000):
            frame = honest_frame(spec.format(count), dtype, count, every, segmented)
            runs = [cost_of(lambda frame=frame: decode(frame, way), small=True).seconds for _ in range(3)]
            slowest = max(slowest, min(runs[1:]))
    return slowest


@functools.cache
def honest_frame(spec: str, dtype: torch.dtype, count: int, every: int, segmented: bool) -> bytes:
    tensor = (gradient(count, 1) * (torch.arange(count) % every == 0)).to(dtype)
    if segmented:  # of one entry each; levels join those that are shorter than four
        length = 4 if "levels" in spec else 1
        return encode_into(gradwire.codec(spec), tensor, segments=[length] * (count // length))
    if spec.startswith("structured"):  # vectors of this size may be grids: matrices of a low rank, or kernels
        return gradwire.codec(spec).encode(_structured(tensor.float()).to(dtype))  # a header may say bool
    return gradwire.codec(spec).encode(tensor)


def _structured(tensor: torch.Tensor) -> torch.Tensor:
    if bool((tensor == 0).any()):
        return (torch.ones(16, 16) * tensor[: len(tensor) // 256, None, None])[:, None]
    rows = tensor[: len(tensor) // 64 * 64].reshape(-1, 64)
    return rows + 0.5 * rows.abs().max() * rows[:, :1].sign() * rows[:1].sign()


def decode(frame: bytes, way: str) -> bool:
    """Decode a frame in this way; False if it is refused."""
    try:
        if way == "decode":
            gradwire.decode(frame, max_elements=LIMIT)
            return True
        header, payload = codecs.open_frame(codecs.as_bytes(frame))
        if not 0 < header.elements <= LIMIT:
            return False  # the caller has no such tensor
        if way == "out":
            gradwire.decode(frame, out=torch.empty(header.shape, dtype=header.dtype))
        elif way == "add":
            codecs.decode_payload(header, payload, torch.zeros(header.elements), 0.25, True)
        elif header.dtype == torch.float32:
            zeros = torch.zeros(header.shape)
            codecs.decode_onto(header, payload, zeros, zeros)
        else:
            codecs.decode_payload(header, payload, torch.empty(header.elements))
        return True
    except gradwire.FrameError:
        return False


def hostile(rng: random.Random, frames: list[bytes]) -> bytes:
    """A frame that costs as much as it can, or a damaged one."""
    if rng.random() < 1 / 4:
        count = int(2 ** rng.uniform(4, 19.9))
        return make(rng.choice(list(MAKERS)), count, rng.choice(FLOATS), rng)
    return repaired(mutate(frames, rng))


def judge(frame: bytes, way: str, honest: Honest, worst: dict[int, Worst], name: str) -> None:
    try:
        header = headers.read_header(memoryview(frame))
    except gradwire.FrameError:
        decode(frame, way)
        return
    if (
        header.codec not in HONEST
        or header.elements > LIMIT
        or (way != "decode" and not header.dtype.is_floating_point)
    ):
        way = "decode"
    results: list[bool] = []
    small = header.elements < 1 << 15
    cost = cost_of(lambda: results.append(decode(frame, way)), small)
    if header.codec not in HONEST:
        return
    size = 4 * header.elements if way in ("add", "onto") else header.elements * header.dtype.itemsize
    tensor = max(1, size if header.elements <= LIMIT else 0)
    found = worst[header.codec]
    found.frames, found.decoded = found.frames + 1, found.decoded + results[0]
    memory = (cost.memory - FIXED_MEMORY) / tensor
    for _ in range(3):  # what is used for the first time, and pages that the kernel has not counted yet, come once
        if memory > MOST_MEMORY:
            memory = min(memory, (cost_of(lambda: decode(frame, way)).memory - FIXED_MEMORY) / tensor)
    seconds, usual = cost.seconds, honest.seconds(header, way)
    for _ in range(4):
        if seconds > MOST_TIME / 2 * usual:
            seconds = min(seconds, cost_of(lambda: decode(frame, way), small=True).seconds)
    if seconds > MOST_TIME * usual:  # then it is worth the time to compare it with honest frames of just its size
        usual = honest.exactly(header, way)
        # Both within the same moments: a machine that was busy during the first measurements may be so no longer.
        seconds = min(seconds, *(cost_of(lambda: decode(frame, way), small=True).seconds for _ in range(5)))
    if memory > found.memory and header.elements >= SIZES[1]:
        found.memory, found.memory_of = memory, name
    if seconds / usual > found.seconds:
        found.seconds, found.seconds_of = seconds / usual, name
    if memory > MOST_MEMORY or seconds > MOST_TIME * usual:
        found.beyond.append(f"{name}: {memory:.2f} × memory, {seconds / usual:.2f} × time")


def run(options: argparse.Namespace) -> int:
    if not can_measure():
        print("this system does not tell the peak of a process's memory")
        return 2
    torch.set_num_threads(1)
    give_back_at_once()
    frames, honest, worst = valid_frames(), Honest(), collections.defaultdict[int, Worst](Worst)
    start, done = time.perf_counter(), 0
    for i in range(options.start, options.start + options.frames):
        if options.seconds and time.perf_counter() - start > options.seconds:
            break
        done += 1
        rng = random.Random(f"{options.seed} {i}")
        frame, way = hostile(rng, frames), rng.choice(WAYS)
        name = f"frame {i} ({len(frame)} bytes, {way})"
        known = {codec: len(found.beyond) for codec, found in worst.items()}
        judge(frame, way, honest, worst, name)
        for codec, found in worst.items():
            if len(found.beyond) > known.get(codec, 0):
                print(f"BEYOND {NAMES[codec]}: {found.beyond[-1]}", flush=True)
                if options.save:
                    (options.save / f"amplification-{options.seed}-{i}.frame").write_bytes(frame)
        if done % 1000 == 0:
            print(f"{done} frames, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print("| codec | frames | decoded | memory: most | time: most |\n|---|---|---|---|---|")
    for codec, found in sorted(worst.items()):
        print(
            f"| {NAMES[codec]} | {found.frames} | {found.decoded} | {max(0.0, found.memory):.2f} × tensor + 1 MB "
            f"| {found.seconds:.2f} × honest |"
        )
    for codec, found in sorted(worst.items()):
        print(f"{NAMES[codec]}: memory {found.memory_of}; time {found.seconds_of}")
    beyond = sum(len(found.beyond) for found in worst.values())
    print(f"{done} frames, {beyond} beyond the bounds, {time.perf_counter() - start:.0f} s")
    return 1 if beyond else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first frame")
    parser.add_argument("--seconds", type=float, help="stop after this time, with the results until then")
    parser.add_argument("--save", type=Path, help="folder for frames that are beyond the bounds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
