"""Interleaved rANS: the layout of lanes and chunks around the kernels.

A lane costs two bytes, so their number grows with the tensor; a chunk can be coded and decoded by itself.
"""

from __future__ import annotations

import struct

import numpy as np

from gradwire import kernels
from gradwire.compress.coding import Coding, EntropyCoder
from gradwire.compress.precision import COARSE, LARGE, SMALL_ALPHABET, finest_precision
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint
from gradwire.models.integer_frequencies import bits_per_symbol
from gradwire.models.symbol_statistics import AnyAlphabet

MAX_LANE_BITS = 6
BITS_PER_LANE = 1 << 13  # of coded data: two bytes a lane are then at most 0.2%
VECTOR = 16  # from this number on, lanes are coded side by side in vector registers
SEVERAL = 128  # in the first byte: there is more than one chunk
SMALLEST_RANS = 32  # bits: a byte for the layout and three for the state of one lane, beside the symbols
BITS_PER_CHUNK = BITS_PER_LANE << MAX_LANE_BITS


def layout(count: int, expected_bits: float) -> tuple[int, int]:
    """Return (log2 of the number of lanes, number of chunks) for a tensor of this size."""
    most = -(-count // kernels.CHUNK_ALIGN)
    chunks = _with_symbols(count, min(max(1, int(expected_bits / BITS_PER_CHUNK)), most))
    lanes = int(expected_bits / chunks / BITS_PER_LANE)
    if lanes < VECTOR:
        lanes //= 2  # too few to be coded side by side: then rather save the bytes
    return min(MAX_LANE_BITS, max(1, lanes).bit_length() - 1), chunks


def fast_layout(count: int, expected_bits: float, lanes: int, in_all: float) -> tuple[int, int]:
    """Return what `layout` does, for many symbols of few bits: with chunks of so many lanes, and `in_all` in all."""
    chunks = max(1, int(max(expected_bits / BITS_PER_LANE, in_all) / lanes))
    return lanes.bit_length() - 1, _with_symbols(count, chunks)


def _with_symbols(count: int, chunks: int) -> int:
    while kernels.chunk_size(count, chunks) * (chunks - 1) >= count:  # rounding up left the last one empty
        chunks -= 1
    return chunks


def head(lane_bits: int, chunk_lengths: list[int]) -> bytes:
    """Return the bytes that stand before the chunks: how many lanes, how many chunks, and their lengths in bytes."""
    if len(chunk_lengths) == 1:
        return bytes([lane_bits])
    lengths = struct.pack(f"<{len(chunk_lengths) - 1}I", *chunk_lengths[:-1])
    return bytes([lane_bits | SEVERAL]) + varint(len(chunk_lengths)) + lengths


def read_head(data: memoryview, count: int) -> tuple[int, np.ndarray, memoryview]:
    """Return (log2 of the number of lanes, the length of every chunk in bytes, the chunks); FrameError if invalid."""
    reader = Reader(data)
    byte = reader.byte()
    lane_bits, chunks = byte & ~SEVERAL, 1
    if byte & SEVERAL:
        chunks = reader.varint(count)
    if lane_bits > MAX_LANE_BITS or (byte & SEVERAL and chunks < 2):
        raise FrameError("invalid rans layout")
    if kernels.chunk_size(count, chunks) * (chunks - 1) >= count:
        raise FrameError("invalid rans layout")
    lengths = np.empty(chunks, dtype=np.int64)
    lengths[:-1] = np.frombuffer(reader.take(4 * (chunks - 1)), dtype="<u4")
    body = reader.rest()
    lengths[-1] = len(body) - int(lengths[:-1].sum())
    if lengths[-1] < 0:
        raise FrameError("rans chunks are longer than the frame")
    return lane_bits, lengths, body


def encode(
    symbols: np.ndarray, frequencies: np.ndarray, precision: int, expected_bits: float, out: np.ndarray | None = None,
    at: tuple[int, int] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the coded symbols, in another layout if one is given. `out`, if it is given, must have `room` bytes."""
    lane_bits, chunks = at or layout(len(symbols), expected_bits)
    size = kernels.chunk_size(len(symbols), chunks)
    if out is None:
        out = np.empty(room(len(symbols), chunks), dtype=np.uint8)
    start = len(head(lane_bits, [0] * chunks))
    lengths = kernels.rans_encode(symbols, size, frequencies, precision, 1 << lane_bits, out[start:])
    out[:start] = np.frombuffer(head(lane_bits, lengths), dtype=np.uint8)
    return out[: start + sum(lengths)]


def room(count: int, chunks: int) -> int:
    """Return how many bytes `encode` may need: no symbol takes more than two."""
    return 2 * count + 64 + (3 * (1 << MAX_LANE_BITS) + 4) * (chunks + 1)


def decode(
    data: memoryview, count: int, frequencies: np.ndarray, precision: int, out: np.ndarray | None = None
) -> np.ndarray:
    """Return `count` symbols, in `out` if it is given; FrameError if the data is damaged."""
    lane_bits, lengths, body = read_head(data, count)
    symbols = np.empty(count, dtype=np.uint8) if out is None else out
    size = kernels.chunk_size(count, len(lengths))
    kernels.rans_decode(body, lengths, size, frequencies, precision, 1 << lane_bits, symbols)
    return symbols


class RansCoder(EntropyCoder):
    """Spends fractions of bits, and comes within half a percent of the entropy."""

    name = "rans"
    wire_number = 3
    fixed_bits = SMALLEST_RANS

    def precisions(self, symbols: int, total: int) -> tuple[int, ...]:
        """Return the coarse precision first, which is fast but loses bits on skewed symbols."""
        finest = finest_precision(symbols)
        if symbols > SMALL_ALPHABET:
            return (finest,)
        # On small tensors the size of the table itself counts.
        return (COARSE, finest) if total >= LARGE else (COARSE, finest - 1, finest)

    def symbol_bits(self, frequencies: np.ndarray, precision: int) -> np.ndarray:
        """Return the ideal length of each symbol's code."""
        return bits_per_symbol(frequencies, precision)

    def encode(self, symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> memoryview:
        """Return the layout and the coded chunks."""
        return memoryview(encode(symbols, coding.table, coding.precision, coding.expected_bits))

    def decode(self, reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
        """Return the symbols of all chunks."""
        return decode(reader.rest(), count, coding.table, coding.precision)
