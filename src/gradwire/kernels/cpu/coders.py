"""The coders, by the native module, on all threads that torch has; Huffman codes on one."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, as_bytes, as_lengths, flat_fp32

__all__ = [
    "crc32", "huffman_decode", "huffman_encode", "huffman_lengths", "pack_bits", "rans_decode", "rans_decode_chunk",
    "rans_dequantize", "rans_encode", "rans_encode_chunk", "unpack_bits",
]  # fmt: skip


def crc32(data: memoryview, value: int = 0) -> int:
    """Compute the checksum with the processor's own instructions, where it has them."""
    return _native.crc32(as_bytes(data), value, torch.get_num_threads())


def pack_bits(symbols: np.ndarray, width: int) -> bytes:
    """Pack `width` bits a symbol."""
    out = np.empty((len(symbols) * width + 7) // 8, dtype=np.uint8)
    _native.pack_bits(symbols, width, out, torch.get_num_threads())
    return out.tobytes()


def unpack_bits(data: memoryview, count: int, width: int, limit: int) -> np.ndarray:
    """Unpack `count` symbols, all below `limit`."""
    if len(data) != (count * width + 7) // 8:
        raise FrameError("wrong length of packed symbols")
    symbols = np.empty(count, dtype=np.uint8)
    if not _native.unpack_bits(as_bytes(data), width, limit, symbols, torch.get_num_threads()):
        raise FrameError("damaged packed symbols")
    return symbols


def huffman_lengths(frequencies: np.ndarray) -> np.ndarray:
    """Return the bits of each symbol's code."""
    lengths = np.empty(len(frequencies), dtype=np.uint8)
    _native.huffman_lengths(np.ascontiguousarray(frequencies, dtype=np.int64), lengths)
    return lengths


def huffman_encode(symbols: np.ndarray, lengths: np.ndarray, codes: np.ndarray) -> memoryview:
    """Concatenate the codes of the symbols."""
    return memoryview(_native.huffman_encode(symbols, lengths, codes))


def huffman_decode(data: memoryview, count: int, lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Decode `count` symbols by a table of prefixes, at several places at once."""
    symbols = np.empty(count, dtype=np.uint8)
    if not _native.huffman_decode(as_bytes(data), lengths, codes, symbols):
        raise FrameError("damaged huffman data")
    return symbols


def rans_encode_chunk(symbols: np.ndarray, frequencies: np.ndarray, precision: int, lanes: int) -> bytes:
    """Encode all symbols as one chunk."""
    out = np.empty(2 * len(symbols) + 3 * lanes + 64, dtype=np.uint8)
    (length,) = _native.rans_encode(symbols, frequencies, precision, lanes, max(1, len(symbols)), out) or (0,)
    return out[:length].tobytes()


def rans_decode_chunk(data: memoryview, count: int, frequencies: np.ndarray, precision: int, lanes: int) -> np.ndarray:
    """Decode one chunk of `count` symbols."""
    symbols = np.empty(count, dtype=np.uint8)
    rans_decode(data, [len(data)], count, frequencies, precision, lanes, symbols)
    return symbols


def rans_encode(
    symbols: np.ndarray, size: int, frequencies: np.ndarray, precision: int, lanes: int, out: np.ndarray
) -> list[int]:
    """Encode chunks of `size` symbols, one after the other; returns their lengths."""
    return _native.rans_encode(symbols, frequencies, precision, lanes, size, out, torch.get_num_threads())


def rans_decode(
    body: memoryview, lengths: np.ndarray | list[int], size: int, frequencies: np.ndarray, precision: int, lanes: int,
    symbols: np.ndarray,
) -> None:  # fmt: skip
    """Decode chunks of `size` symbols into `symbols`."""
    threads = torch.get_num_threads()
    if not _native.rans_decode(
        as_bytes(body), as_lengths(lengths), frequencies, precision, lanes, size, symbols, threads
    ):
        raise FrameError("damaged rans chunk")


@where(flat_fp32)  # what is written
def rans_dequantize(
    body: memoryview, lengths: np.ndarray | list[int], size: int, frequencies: np.ndarray, precision: int,
    lane_bits: int, values: torch.Tensor, out: torch.Tensor, accumulate: bool, onto: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Decode and look values up in one pass; always True."""
    if not _native.rans_dequantize(
        as_bytes(body), as_lengths(lengths), frequencies, precision, 1 << lane_bits, size, as_array(values),
        as_array(out), accumulate, as_array(out if onto is None else onto), torch.get_num_threads(),
    ):  # fmt: skip
        raise FrameError("damaged rans chunk")
    return True
