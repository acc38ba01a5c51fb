"""The structures of sources/jobs.h as numpy lays them out: what the host writes for kernels, and reads of them."""

from __future__ import annotations

import numpy as np

SYMBOLS, MOST_HEAD, PIECES = 256, 640, 6
BYTES, STREAM, LENGTH = range(3)  # kinds of pieces
NONFINITE, UNUSUAL = 1, 2  # bits of a status
PART, TILE, SAMPLE = 1024, 8192, 65536  # entries of a part of a sample, of a tile, and of a sample at most
GROUP = 8  # tiles of a group
SLAB = 8192  # bytes of a piece that one block puts into the message


def _structure(**fields: object) -> np.dtype:
    return np.dtype(list(fields.items()), align=True)


TENSOR = _structure(
    gradient="u8", before="u8", after="u8", seed="u8", step_at="u8", sample="u8", format="u8", count="i8", first="i8",
    own="u8", decay="f4", dtype="i4", frame="i4", stream="i4", parts="i4", tiles="i4", first_part="i4", first_tile="i4",
)  # fmt: skip
FIT = _structure(
    nonzero="u8", mean_abs="f8", step="f4", inverse="f4", beta="i4", zero_mass="i4", sampled="i4", closer="i4",
    parts_done="u4", tiles_done="u4",
)  # fmt: skip
STREAM_ = _structure(
    symbols="u8", counts="u8", coded="u8", lengths="u8", offsets="u8", format="u8", count="i8", alphabet="i4",
    zero="i4", coder="i4", models="i4", first_tensor="i4", tensors="i4", most_chunks="i4", frame="i4", used_coder="i4",
    model="i4", precision="i4", lane_bits="i4", chunks="i4", head_length="i4", chunk_size="i8", length="u8", data="u8",
    place="u8",
    reciprocal=("u4", SYMBOLS), packed=("u4", SYMBOLS), head=("u1", MOST_HEAD),
)  # fmt: skip
PIECE = _structure(kind="i4", stream="i4", bytes="u8", length="u8", offset="u8")
FRAME = _structure(
    start=("u1", 5), shape_length="u1", shape=("u1", 114), count="i8", pieces="i4", crc="u4", offset="u8", length="u8",
    places="u4", placed="u4", piece=(PIECE, PIECES),
)  # fmt: skip
STATUS = _structure(length="u8", bits="u4", closer="u4")
WHERE = _structure(item="i4", index="i4")
JOB = _structure(
    tensors="u8", fits="u8", streams="u8", frames="u8", chunks="u8", pieces="u8", partial="u8", tile_sums="u8",
    status="u8", out="u8", room="u8", symbols="u8", stamp="u8", stream_count="i4", frame_count="i4", chunk_count="i4",
    piece_count="i4", everything="i4",
)  # fmt: skip
TOLD_ANEW = 4  # fields at the front of a tensor that are told for every message: addresses, and its seed
ALL = (TENSOR, FIT, STREAM_, PIECE, FRAME, STATUS, WHERE, JOB)

# ── decoding: sources/arrivals.h ──

MESSAGE = _structure(bytes="u8", length="u8")
ARRIVAL = _structure(
    symbols="u8", offsets="u8", table="u8", steps="u8", lengths="u8", own="u8", count="i8", most="i8", message="i4",
    index="i4", segments="i4", codec="i4", dtype="i4", family="i4", coder="i4", precision="i4", lane_bits="i4",
    chunks="i4", constant="i4", alphabet="i4", chunk_size="i8", symbol_count="i8", frame="u8", length="u8",
    chunk_lengths="u8", data="u8", data_length="u8", rest="u8", rest_length="u8", crc="u4", checked="u4", checks="u4",
    broken="u4", levels=("f4", SYMBOLS),
)  # fmt: skip
SOURCE = _structure(arrival="i4", segment="i4", first="i8")
TARGET = _structure(out="u8", count="i8", sources="u8", dtype="i4", first_tile="i8")
DECODE_JOB = _structure(
    messages="u8", arrivals="u8", targets="u8", status="u8", formats="u8", stamp="u8", room="i8", message_count="i4",
    arrival_count="i4", target_count="i4", weight="f4", adds="i4", spare="i4",
)  # fmt: skip
FORMAT_TABLE = _structure(
    alphabet="i4", zero="i4", magnitudes="i4", spare="i4", levels=("f4", SYMBOLS), masses=("u4", (128, 128))
)
SLOTS = 4096 + SYMBOLS  # words of a frame’s table for the coder
COMBINED = 4096  # entries of a tile whose mean one block makes
ALL_DECODING = (MESSAGE, ARRIVAL, SOURCE, TARGET, DECODE_JOB, FORMAT_TABLE)
