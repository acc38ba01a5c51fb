"""The largest entries on the GPU: sparse frames of top-k (and so DGC), SBC and STC."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable

import numpy as np
import torch

from gradwire.compress.positions import FINEST, class_of
from gradwire.convert.conversion import Converter
from gradwire.convert.sbc import SBC
from gradwire.convert.sparse import Sparse
from gradwire.convert.sparse_values import BF16, FP16, FP32, ONE_MAGNITUDE, ONE_VALUE
from gradwire.convert.stc import STC
from gradwire.convert.topk import TopK
from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.frame.headers import SPARSE
from gradwire.gpu.families import Batch, Bytes, Family, FramePieces, FrameTask, StreamPlan, Unpack
from gradwire.gpu.structures import COMBINED, GROUP, PART, SAMPLE, TILE

FORMAT = np.dtype([("kind", "i4"), ("sides", "i4")])
ARRAYS = (
    "parts", "tiles", "counts", "group_counts", "sums", "doubts", "chunks", "values", "positions", "sent",
)  # fmt: skip
PLAN = np.dtype([("room", "i8"), ("doubtful", "i8"), *((name, "u8") for name in ARRAYS)])
SELECTION = 4 * (26 + 2 + 128 + 2 * 512)  # bytes of the structure of that name in sources/sparse.h
TILE_RECORD, COUNT, DOUBT, CHUNK_RECORD, CHUNK, BUCKETS = 8, 8, 8, 24, 2048, 4096
SAMPLED = 16384  # entries of the sample of a tensor with more than SAMPLE
SPARSE_TILE = 4096  # entries of a tile of these kernels
HEAD = 16  # room for the number of entries, how they travel, and how many classes an octave has
MOST = 2**31 - 1  # entries of a tensor; larger ones are left to the host
SMALL_EXTRA = 1 << 17  # room for candidates beyond those that are expected
BYTES = {FP32: 4, FP16: 2, BF16: 2}  # of a value


class SparseFamily(Family):
    """Sparse codecs that send a number of entries of each tensor, with positions as classes of gaps."""

    combines = ("sparse_decoding", "combine_sparse")
    unpacks = tuple(
        Unpack("sparse_decoding", kernel, 256, True) for kernel in ("measure_gaps", "join_gaps", "place_entries")
    )

    def takes(self, converter: Converter) -> bool:
        """Tell whether it is top-k with values in a cast, SBC or STC, without a threshold."""
        if not isinstance(converter, Sparse) or converter.threshold is not None or converter.positions == "golomb":
            return False
        return isinstance(converter, SBC | STC) or (isinstance(converter, TopK) and converter.cast is not None)

    def pieces(self, task: FrameTask) -> FramePieces:
        """Return number and kind of the entries, the classes of their gaps, the low bits of these, and the values."""
        converter, elements = task.converter, task.count
        assert isinstance(converter, Sparse)
        assert len(task.tensors) == 1, "sparse frames have no segments"
        k = _room_for(_count(converter, elements), elements)
        plan, scratch = _plan(k, elements, _sides(converter))
        kind = _kind(converter)
        values = k * BYTES[kind] if kind in BYTES else 4 + 4 * -(-k // 32) if kind == ONE_MAGNITUDE else 4
        most_classes = class_of(elements, FINEST) + 1  # a kernel knows how many there are
        stream = StreamPlan(most_classes, zero=0, most=max(k, 1))
        head, low = Bytes(bytes(HEAD) + plan.tobytes(), [HEAD]), Bytes(most=_most_low_bytes(k, elements))
        pieces: list[Bytes | int] = [head, ~0, 0, low, Bytes(most=values)]
        return FramePieces(SPARSE, 0, pieces, [stream], [scratch])

    def parts(self, count: int) -> int:
        """Return how many blocks look at the sample: of large tensors it is a smaller one than others take."""
        return _parts(count)

    def alike(self, converter: Converter, count: int) -> Hashable:
        """Return how values travel, and room for entries: in a warm-up, their number is another in every step."""
        return _alike(converter, count)

    def told(self, task: FrameTask) -> int:
        """Return how many entries are sent at most."""
        return _count(task.converter, task.count)

    def format(self, converter: Converter) -> np.ndarray:
        """Return how values travel, and whether both signs are looked at apart."""
        assert isinstance(converter, Sparse)
        return np.array([(_kind(converter), _sides(converter))], FORMAT).view(np.uint8)

    def room_to_decode(self, converter: Converter, count: int) -> tuple[int, int]:
        """Return how many entries a frame may send, and room for their positions and values."""
        k = _room_for(_count(converter, count), count)
        return k, 64 + 16 * -(-k // CHUNK) + 8 * k + 4 * (-(-count // COMBINED) + 1)

    def convert(self, batch: Batch) -> None:
        """Sample, pick out candidates, find the k-th, and write what is sent."""
        batch.launch_parts("sparse", "sample", 1024)
        batch.launch_tiles("sparse", "gather", each=TILE // SPARSE_TILE)
        batch.launch_groups("sparse", "count_candidates", 512)
        batch.launch_groups("sparse", "tally", 512)
        batch.launch_groups("sparse", "send_chosen", 512)
        batch.launch_groups("sparse_gaps", "count_gaps")
        batch.launch_groups("sparse_gaps", "write_gaps")


def mask_sent(batch: Batch, velocities: torch.Tensor) -> None:
    """Zero velocities (fp32) where the batch's latest message has sent something that is not zero.

    `velocities` are addresses on the device (int64), one for each tensor of the message in its order, 0 for none. The
    launch goes to the stream of the message, behind it and before the next one.
    """
    arguments = Arguments(batch.job, batch.groups, velocities)
    programs.kernel("sparse_gaps", "mask_sent", batch.device)(batch.group_count, 256, arguments)


@functools.lru_cache(maxsize=4096)
def _count(converter: Converter, elements: int) -> int:
    assert isinstance(converter, Sparse)
    return (converter.count(elements) or 0) if elements <= MOST else 0


def _room_for(k: int, elements: int) -> int:
    """Return room for k entries or up to a quarter more: one of few numbers, so that few layouts are made."""
    room = 1.0
    while room < k:
        room *= 1.25
    return min(math.ceil(room), elements) if k else 0


@functools.lru_cache(maxsize=4096)
def _alike(converter: Converter, count: int) -> Hashable:
    assert isinstance(converter, Sparse)
    return SPARSE, _kind(converter), _sides(converter), _room_for(_count(converter, count), count)


def _parts(elements: int) -> int:
    return -(-elements // PART) if elements <= SAMPLE else SAMPLED // PART


def _kind(converter: Sparse) -> int:
    if isinstance(converter, TopK):
        assert converter.cast is not None
        return converter.cast
    return ONE_VALUE if isinstance(converter, SBC) else ONE_MAGNITUDE


def _sides(converter: Sparse) -> int:
    return 2 if isinstance(converter, SBC) else 1


def _plan(k: int, elements: int, sides: int) -> tuple[np.ndarray, int]:
    """Return where a tensor's arrays are in its scratch, and how much of it there is."""
    expected = sides * (k + min(k, elements // 50))
    room = min(elements, 2 * expected + SMALL_EXTRA)
    parts, tiles = _parts(elements), -(-elements // SPARSE_TILE)
    chunks, groups, doubtful = -(-k // CHUNK), -(-elements // (TILE * GROUP)), min(room, elements // 128 + 4096)
    sizes = (
        2 * BUCKETS * sides * parts, TILE_RECORD * tiles, COUNT * sides * tiles, COUNT * sides * groups,
        COUNT * sides * groups, DOUBT * doubtful, CHUNK_RECORD * chunks, 4 * room, 4 * room, 4 * k,
    )  # fmt: skip
    plan, at = np.zeros(1, PLAN), -(-SELECTION // 16) * 16
    plan["room"], plan["doubtful"] = room, doubtful
    for name, size in zip(ARRAYS, sizes, strict=True):
        plan[name] = at
        at += -(-size // 16) * 16
    return plan, at


def _most_low_bytes(k: int, elements: int) -> int:
    """Return room for the low bits of k positions or fewer: they take most if all gaps are alike."""
    k = max(1, min(k, int(elements / math.e) + 1))
    return int(k * math.log2(max(elements / k, 2)) / 8) + 16
