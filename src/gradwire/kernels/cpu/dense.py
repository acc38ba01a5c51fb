"""The kernels of dense codecs and the coders, by the native module."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.float_formats import Format
from gradwire.kernels.reference import dense as reference
from gradwire.kernels.reference.dense import RUN, SAMPLE, SAMPLE_RUNS, chunk_size, compensate, dequantize, histogram

__all__ = [
    "absmax", "chunk_size", "compensate", "crc32", "dequantize", "histogram", "huffman_decode", "huffman_encode",
    "instruction_sets", "moments", "pack_bits", "quantize", "quantize_rans", "rans_decode", "rans_decode_chunk",
    "rans_dequantize", "rans_encode", "rans_encode_chunk", "sample", "squared_errors", "to_symbols", "unpack_bits",
    "use",
]  # fmt: skip


def instruction_sets() -> list[str]:
    """Those this machine has, best last."""
    return _native.available()


def use(name: str) -> None:
    """Choose an instruction set; for tests and benchmarks."""
    if not _native.use(name):
        raise ValueError(f"this machine has no {name!r} kernels; it has {', '.join(instruction_sets())}")


def _native_can(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """The same memory as an array: numpy hands it to native code ten times as fast as torch does."""
    return None if tensor is None else tensor.numpy()


def _bytes(data: memoryview | np.ndarray) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


@lru_cache
def _format(fmt: Format) -> tuple[int, int, int, int, bool, float]:
    return (
        fmt.min_exponent, fmt.mantissa, fmt.zero_symbol, len(fmt.magnitudes) - 1, bool(fmt.sign), fmt.largest
    )  # fmt: skip


def _seed(seed: int | None) -> int | None:
    return None if seed is None else seed & 0xFFFFFFFFFFFFFFFF


def crc32(data: memoryview, value: int = 0) -> int:
    return _native.crc32(_bytes(data), value)


def sample(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float) -> torch.Tensor:
    if gradient.numel() <= SAMPLE or not _native_can(gradient):
        return reference.sample(gradient, memory, decay)
    out = torch.empty(SAMPLE)
    _native.sample(_array(gradient), _array(memory), decay, SAMPLE_RUNS, RUN, _array(out))
    return out


def moments(x: torch.Tensor) -> tuple[int, float, float]:
    return _native.moments(_array(x)) if _native_can(x) else reference.moments(x)


def absmax(x: torch.Tensor) -> float:
    return _native.absmax(_array(x)) if _native_can(x) else reference.absmax(x)


def to_symbols(u: torch.Tensor, step: float, fmt: Format, seed: int | None = None) -> torch.Tensor:
    # The values matter only to an error memory, and here is none.
    return quantize(u, None, None, 0.0, step, fmt, _no_values(fmt.symbols), seed)


def squared_errors(u: torch.Tensor, steps: list[float], fmt: Format) -> list[float]:
    if not _native_can(u):
        return reference.squared_errors(u, steps, fmt)
    return _native.squared_errors(_array(u), steps, _format(fmt), _array(_no_values(fmt.symbols)))


@lru_cache
def _no_values(count: int) -> torch.Tensor:
    return torch.zeros(count)


def quantize(
    gradient: torch.Tensor,
    memory: torch.Tensor | None,
    memory_out: torch.Tensor | None,
    decay: float,
    step: float,
    fmt: Format,
    values: torch.Tensor,
    seed: int | None = None,
) -> torch.Tensor:
    if not _native_can(gradient):
        return reference.quantize(gradient, memory, memory_out, decay, step, fmt, values, seed)
    symbols = torch.empty(gradient.numel(), dtype=torch.uint8)
    _native.quantize(
        _array(gradient), _array(memory), _array(memory_out), decay, step, _format(fmt), _array(values), _seed(seed),
        _array(symbols),
    )  # fmt: skip
    return symbols


def pack_bits(symbols: np.ndarray, width: int) -> bytes:
    out = np.empty((len(symbols) * width + 7) // 8, dtype=np.uint8)
    _native.pack_bits(symbols, width, out)
    return out.tobytes()


def unpack_bits(data: memoryview, count: int, width: int, limit: int) -> np.ndarray:
    if len(data) != (count * width + 7) // 8:
        raise FrameError("wrong length of packed symbols")
    symbols = np.empty(count, dtype=np.uint8)
    if not _native.unpack_bits(_bytes(data), width, limit, symbols):
        raise FrameError("damaged packed symbols")
    return symbols


def huffman_encode(symbols: np.ndarray, lengths: np.ndarray, codes: np.ndarray) -> bytes:
    out = np.empty(2 * len(symbols) + 8, dtype=np.uint8)
    return out[: _native.huffman_encode(symbols, lengths, codes, out)].tobytes()


def huffman_decode(data: memoryview, count: int, lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    symbols = np.empty(count, dtype=np.uint8)
    if not _native.huffman_decode(_bytes(data), lengths, codes, symbols):
        raise FrameError("damaged huffman data")
    return symbols


def rans_encode_chunk(symbols: np.ndarray, frequencies: np.ndarray, precision: int, lanes: int) -> bytes:
    out = np.empty(2 * len(symbols) + 3 * lanes + 64, dtype=np.uint8)
    (length,) = _native.rans_encode(symbols, frequencies, precision, lanes, max(1, len(symbols)), out) or (0,)
    return out[:length].tobytes()


def rans_decode_chunk(data: memoryview, count: int, frequencies: np.ndarray, precision: int, lanes: int) -> np.ndarray:
    symbols = np.empty(count, dtype=np.uint8)
    rans_decode(data, [len(data)], count, frequencies, precision, lanes, symbols)
    return symbols


def rans_encode(
    symbols: np.ndarray, size: int, frequencies: np.ndarray, precision: int, lanes: int, out: np.ndarray
) -> list[int]:
    """Chunks of `size` entries, one after the other; returns their lengths."""
    return _native.rans_encode(symbols, frequencies, precision, lanes, size, out)


def rans_decode(
    body: memoryview, lengths: list[int], size: int, frequencies: np.ndarray, precision: int, lanes: int,
    symbols: np.ndarray,
) -> None:  # fmt: skip
    if not _native.rans_decode(_bytes(body), lengths, frequencies, precision, lanes, size, symbols):
        raise FrameError("damaged rans chunk")


def quantize_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    fmt: Format, values: torch.Tensor, frequencies: np.ndarray, precision: int, lane_bits: int, chunks: int,
    out: torch.Tensor,
) -> tuple[list[int], int] | None:  # fmt: skip
    """Error feedback, conversion and rANS in one pass: the lengths of the chunks, which stand in `out`, and how many
    entries they hold. That is less than all if it stopped before a NaN or an infinity."""
    if not _native_can(gradient):
        return None
    size = chunk_size(gradient.numel(), chunks)
    return _native.quantize_rans(
        _array(gradient), _array(memory), _array(memory_out), decay, step, _format(fmt), _array(values), frequencies,
        precision, 1 << lane_bits, size, _array(out),
    )  # fmt: skip


def rans_dequantize(
    body: memoryview, lengths: list[int], size: int, frequencies: np.ndarray, precision: int, lane_bits: int,
    values: torch.Tensor, out: torch.Tensor, accumulate: bool, onto: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Decode chunks of `size` entries straight into fp32 `out`, alone or added to it, or to `onto`."""
    if not _native.rans_dequantize(
        _bytes(body), lengths, frequencies, precision, 1 << lane_bits, size, _array(values), _array(out), accumulate,
        _array(out if onto is None else onto),
    ):  # fmt: skip
        raise FrameError("damaged rans chunk")
    return True
