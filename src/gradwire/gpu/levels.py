"""Quantizers with a few levels in each bucket on the GPU: BinGrad, ORQ, QSGD, TernGrad, signSGD and linear."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gradwire.convert.bingrad import BinGrad
from gradwire.convert.conversion import Converter
from gradwire.convert.level_buckets import make_buckets
from gradwire.convert.level_numbers import PRECISIONS, sent
from gradwire.convert.levels import Levels, widths
from gradwire.convert.linear import LinearLevels
from gradwire.convert.orq import ORQ
from gradwire.convert.qsgd import QSGD
from gradwire.convert.signsgd import SignSGD
from gradwire.convert.terngrad import TernGrad
from gradwire.frame.byte_fields import varint
from gradwire.frame.headers import LEVELS, SEGMENTED
from gradwire.gpu.families import RANS, RAW, Batch, Bytes, Family, FramePieces, FrameTask, StreamPlan

MAX_NORM, L2_NORM, RANGE = range(3)  # methods of sources/levels.h
SMALLEST_BUCKET = 32
THREADS = 128
_PRECISIONS = tuple(PRECISIONS.values())
PLAN = np.dtype(
    [("numbers_bytes", "i8"), ("levels", "i4"), ("kind", "i4"), ("precision", "i4"), ("bucket_bits", "i4"),
     ("side_length", "i8")]
)  # fmt: skip


class LevelsFamily(Family):
    """One kind of kernel, for buckets up to a size: those have registers for all entries of a bucket."""

    combines = ("levels_combine", "combine_levels")

    def __init__(self, kernels: str, above: int, up_to: int):
        self.kernels, self.above, self.up_to = kernels, above, up_to

    def takes(self, converter: Converter) -> bool:
        """Tell whether it is a method of these kernels, with buckets that tiles consist of."""
        if not isinstance(converter, Levels) or converter.coder not in ("auto", "rans", "raw"):
            return False
        bucket = converter.bucket
        return (
            _kernels(converter) == self.kernels
            and bucket >= SMALLEST_BUCKET
            and bucket.bit_count() == 1
            and self.above < bucket <= self.up_to
        )

    def pieces(self, task: FrameTask) -> FramePieces:
        """Return side information with room for the numbers of each segment, and the symbols."""
        converter = task.converter
        assert isinstance(converter, Levels)
        lengths = tuple(t.gradient.numel() for t in task.tensors)
        precision = _PRECISIONS.index(converter.precision)
        side = _side(lengths, converter.bucket, converter.levels, converter.kind, precision)
        template = side.bytes_ + bytes(side.numbers)
        steps = [len(side.bytes_) + side.before[k] for k in side.segment]
        stream = StreamPlan(converter.levels, converter.levels // 2, RAW if converter.coder == "raw" else RANS)
        flags = SEGMENTED if len(task.tensors) > 1 else 0
        return FramePieces(LEVELS, flags, [Bytes(template, steps), 0], [stream])

    def format(self, converter: Converter) -> np.ndarray:
        """Return the method and its parameters."""
        assert isinstance(converter, Levels)
        precision = _PRECISIONS.index(converter.precision)
        fields = [_method(converter), converter.levels, converter.kind, precision, converter.bucket, converter.outward]
        return np.array(fields, dtype=np.int32).view(np.uint8)

    def arrival(self, converter: Converter, lengths: Sequence[int]) -> np.ndarray | None:
        """Return the side information that a frame begins with, and where each tensor's numbers are."""
        assert isinstance(converter, Levels)
        precision = _PRECISIONS.index(converter.precision)
        return _plan(tuple(lengths), converter.bucket, converter.levels, converter.kind, precision)

    def convert(self, batch: Batch) -> None:
        """Find levels and convert, in one pass."""
        batch.launch_tiles(f"levels_{self.kernels}", f"{self.kernels}{self.up_to}", THREADS)


_SIZES = (512, 1024, 2048)
LEVEL_FAMILIES = tuple(
    LevelsFamily(kernels, above, up_to)
    for kernels, sizes in (
        ("scaled", _SIZES), ("signs", _SIZES), ("two_means", _SIZES[:2]), ("plus_minus", _SIZES[:2]),
        ("searched", _SIZES),
    )
    for above, up_to in zip((0, *sizes), sizes, strict=False)
)  # fmt: skip


def _kernels(converter: Levels) -> str | None:
    """Return which kernels find the levels of this converter, if there are any."""
    if getattr(converter, "clip", 0):
        return None
    if isinstance(converter, QSGD | TernGrad | LinearLevels):
        return "scaled"
    if isinstance(converter, SignSGD):
        return "signs"
    if isinstance(converter, BinGrad):
        return "plus_minus" if converter.stochastic else "two_means"
    return "searched" if isinstance(converter, ORQ) and converter.search == "greedy" else None


def _method(converter: Levels) -> int:
    """Return which of the methods of its kernels this is."""
    if isinstance(converter, LinearLevels):
        return RANGE
    return L2_NORM if isinstance(converter, QSGD) and converter.norm == "l2" else MAX_NORM


class _Side(NamedTuple):
    """The front of a payload."""

    bytes_: bytes  # side information, without the numbers
    numbers: int  # bytes of all numbers
    segment: list[int]  # of each tensor
    position: list[int]  # of each tensor's first entry in its segment
    before: list[int]  # bytes of numbers in front of those of each segment
    lengths: tuple[int, ...]  # of the segments


@lru_cache(maxsize=256)
def _side(lengths: tuple[int, ...], bucket: int, levels: int, kind: int, precision: int) -> _Side:
    """Return what a payload begins with, and where the numbers of each tensor are.

    Tensors share a segment where one of them is too small for levels of its own.
    """
    segments = tuple(n for n in lengths if n) if len(lengths) > 1 else ()
    buckets = make_buckets(sum(lengths), segments, bucket, levels)
    side = varint(buckets.bucket) + bytes([levels, kind | precision << 2])
    if segments:
        side += varint(len(buckets.segments)) + b"".join(map(varint, buckets.segments))
    numbers = np.append(0, np.cumsum(sent(buckets.sizes, widths(kind, levels)) * _PRECISIONS[precision].itemsize))
    begins = np.cumsum((0, *buckets.segments))
    starts = np.cumsum((0, *lengths))[:-1]
    of_tensors = np.minimum(np.searchsorted(begins, starts, "right") - 1, len(buckets.segments) - 1)
    before = numbers[np.searchsorted(buckets.starts, begins[:-1])]
    return _Side(
        side, int(numbers[-1]), of_tensors.tolist(), (starts - begins[of_tensors]).tolist(), before.tolist(),
        buckets.segments,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _plan(lengths: tuple[int, ...], bucket: int, levels: int, kind: int, precision: int) -> np.ndarray:
    """Return the `LevelsPlan` of sources/levels_arrival.h."""
    side = _side(lengths, bucket, levels, kind, precision)
    head = np.zeros(1, PLAN)
    head["numbers_bytes"], head["side_length"] = side.numbers, len(side.bytes_)
    head["levels"], head["kind"], head["precision"] = levels, kind, precision
    head["bucket_bits"] = bucket.bit_length() - 1
    parts = np.array(
        [(at, side.lengths[k], side.before[k]) for k, at in zip(side.segment, side.position, strict=True)], np.int64
    )
    padded = side.bytes_ + bytes(-len(side.bytes_) % 8)
    return np.frombuffer(head.tobytes() + padded + parts.tobytes(), np.uint8)
