"""The coders: symbols to bytes and back, and the checksum; everything here follows docs/wire-format.md.

Symbols are uint8 arrays of numpy in the host's memory, wherever the tensor is that they were made of.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gradwire.errors import FrameError

__all__ = [
    "CHUNK_ALIGN", "HUFFMAN_LIMIT", "chunk_size", "crc32", "huffman_decode", "huffman_encode", "huffman_lengths",
    "pack_bits", "rans_decode", "rans_decode_chunk", "rans_dequantize", "rans_encode", "rans_encode_chunk",
    "unpack_bits",
]  # fmt: skip

HUFFMAN_LIMIT = 15  # bits
RANS_LOW_BITS, RANS_HIGH_BITS = 14, 22  # states live in [2^14, 2^22)
CHUNK_ALIGN = 64


def crc32(data: memoryview, value: int = 0) -> int:
    """Return the CRC-32 of the bytes, as zlib defines it; `value` is the checksum of what came before them."""
    return zlib.crc32(data, value)


def pack_bits(symbols: np.ndarray, width: int) -> bytes:
    """Pack `width` bits a symbol, from the lowest bit of each byte upwards."""
    bits = np.unpackbits(symbols[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little").tobytes()


def unpack_bits(data: memoryview, count: int, width: int, limit: int) -> np.ndarray:
    """Return `count` symbols, all below `limit`."""
    if len(data) != (count * width + 7) // 8:
        raise FrameError("wrong length of packed symbols")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    symbols = np.packbits(bits[: count * width].reshape(count, width), axis=1, bitorder="little").ravel()
    if bits[count * width :].any() or (count and symbols.max() >= limit):
        raise FrameError("damaged packed symbols")
    return symbols


def huffman_lengths(frequencies: np.ndarray) -> np.ndarray:
    """Return the bits of each symbol's code, by package-merge; 0 where it has none.

    A leaf is a symbol with its frequency. In each of 15 rounds, as many as the longest code has bits, the packages of
    the round before and all leaves are sorted by weight and joined in pairs, which are the packages of this round. A
    symbol's code has one bit for every time that its leaf is in one of the n−1 lightest packages of the last round, for
    n leaves.
    """
    leaves = sorted((int(f), (s,)) for s, f in enumerate(frequencies) if f)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(HUFFMAN_LIMIT):
        merged = sorted(leaves + packages, key=lambda package: package[0])  # stable: ties stay in order
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(merged[::2], merged[1::2], strict=False)]
    lengths = np.zeros(len(frequencies), dtype=np.uint8)
    for _, members in packages[: len(leaves) - 1]:
        for symbol in members:
            lengths[symbol] += 1
    return lengths


def huffman_encode(symbols: np.ndarray, lengths: np.ndarray, codes: np.ndarray) -> memoryview:
    """Concatenate the codes of the symbols, from the highest bit of each byte downwards."""
    words = [format(int(c), f"0{int(n)}b") if n else "" for c, n in zip(codes, lengths, strict=True)]
    bits = "".join([words[s] for s in symbols.tolist()])
    bits += "0" * (-len(bits) % 8)
    return memoryview(int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b"")


def huffman_decode(data: memoryview, count: int, lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Decode `count` symbols; anything but zeros up to the end of the last byte is damage."""
    table = {(int(n), int(c)): s for s, (n, c) in enumerate(zip(lengths, codes, strict=True)) if n}
    longest = int(lengths.max())
    bits = "".join([f"{byte:08b}" for byte in bytes(data)])
    symbols, position = np.empty(count, dtype=np.uint8), 0
    for i in range(count):
        code = length = 0
        while (length, code) not in table:
            if length == longest or position == len(bits):
                raise FrameError("damaged huffman data")
            code, length, position = code << 1 | (bits[position] == "1"), length + 1, position + 1
        symbols[i] = table[length, code]
    if len(bits) - position > 7 or "1" in bits[position:]:
        raise FrameError("damaged huffman data")
    return symbols


def chunk_size(count: int, chunks: int) -> int:
    """Return the number of entries in every chunk but the last: equal parts, rounded up to whole rows of 64."""
    return -(-count // (chunks * CHUNK_ALIGN)) * CHUNK_ALIGN


def rans_encode_chunk(symbols: np.ndarray, frequencies: np.ndarray, precision: int, lanes: int) -> bytes:
    """Encode one chunk: the final states of all lanes, 3 bytes each, then the emitted bytes."""
    starts = np.cumsum(frequencies) - frequencies
    states = np.full(lanes, 1 << RANS_LOW_BITS, dtype=np.int64)
    emitted = bytearray()
    for row in range(0, len(symbols), lanes):
        s = symbols[row : row + lanes]
        x, f = states[: len(s)], frequencies[s]
        for _ in range(2):
            full = x >= f << (RANS_HIGH_BITS - precision)
            emitted += (x[full] & 255).astype(np.uint8).tobytes()
            x = np.where(full, x >> 8, x)
        states[: len(s)] = (x // f << precision) + x % f + starts[s]
    return b"".join(int(x).to_bytes(3, "little") for x in states) + bytes(emitted)


def rans_decode_chunk(data: memoryview, count: int, frequencies: np.ndarray, precision: int, lanes: int) -> np.ndarray:
    """Decode one chunk of `count` symbols; all of it must be used up, and all lanes end where they began."""
    if len(data) < 3 * lanes:
        raise FrameError("rans chunk is cut short")
    raw = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    states = raw[: 3 * lanes].reshape(lanes, 3) @ np.array([1, 1 << 8, 1 << 16])
    if ((states < 1 << RANS_LOW_BITS) | (states >= 1 << RANS_HIGH_BITS)).any():
        raise FrameError("damaged rans state")
    starts = np.cumsum(frequencies) - frequencies
    symbol_of_slot = np.repeat(np.arange(len(frequencies)), frequencies)
    symbols, end = np.empty(count, dtype=np.uint8), len(raw)
    for row in range((count - 1) // lanes * lanes, -1, -lanes):
        x = states[: min(lanes, count - row)]
        slot = x & (1 << precision) - 1
        s = symbol_of_slot[slot]
        symbols[row : row + len(x)] = s
        x = frequencies[s] * (x >> precision) + slot - starts[s]
        for threshold in (RANS_LOW_BITS - 8, RANS_LOW_BITS):
            short = x < 1 << threshold
            begin = end - int(short.sum())
            if begin < 3 * lanes:
                raise FrameError("rans chunk is cut short")
            x[short] = x[short] << 8 | raw[begin:end]
            end = begin
        states[: len(x)] = x
    if end != 3 * lanes or (states != 1 << RANS_LOW_BITS).any():
        raise FrameError("damaged rans chunk")
    return symbols


def rans_encode(
    symbols: np.ndarray, size: int, frequencies: np.ndarray, precision: int, lanes: int, out: np.ndarray
) -> list[int]:
    """Encode chunks of `size` symbols, one after the other into `out`; returns their lengths."""
    lengths, position = [], 0
    for start in range(0, len(symbols), size):
        chunk = rans_encode_chunk(symbols[start : start + size], frequencies, precision, lanes)
        out[position : position + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        lengths.append(len(chunk))
        position += len(chunk)
    return lengths


def rans_decode(
    body: memoryview, lengths: np.ndarray | list[int], size: int, frequencies: np.ndarray, precision: int, lanes: int,
    symbols: np.ndarray,
) -> None:  # fmt: skip
    """Decode chunks of `size` symbols, whose lengths in bytes these are, into `symbols`."""
    position = 0
    for i, length in enumerate(lengths):
        part = symbols[i * size : (i + 1) * size]
        part[:] = rans_decode_chunk(body[position : position + length], len(part), frequencies, precision, lanes)
        position += length


def rans_dequantize(
    body: memoryview, lengths: np.ndarray | list[int], size: int, frequencies: np.ndarray, precision: int,
    lane_bits: int, values: torch.Tensor, out: torch.Tensor, accumulate: bool, onto: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Decode chunks of `size` entries straight into fp32 `out`, alone or added to it, or added to `onto`.

    False says that this device has no such kernel: the caller then decodes the symbols, and looks up their values.
    """
    return False
