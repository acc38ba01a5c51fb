"""The kernels of dense codecs, and the coders; everything here follows docs/wire-format.md."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gradwire.errors import FrameError
from gradwire.float_formats import Format

SAMPLE_RUNS, RUN = 1024, 64
SAMPLE = SAMPLE_RUNS * RUN  # tensors up to this size are looked at whole
FLOAT_MAX = torch.finfo(torch.float32).max
RANS_LOW_BITS, RANS_HIGH_BITS = 14, 22  # states live in [2^14, 2^22)
CHUNK_ALIGN = 64


def crc32(data: memoryview, value: int = 0) -> int:
    return zlib.crc32(data, value)


# ── what to send ──────────────────────────────────────────────────────────────────────────────────


def mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash in int64 arithmetic: the documented counter-based generator."""
    mask = 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x21F0AAAD & mask
    x = (x ^ (x >> 15)) * 0x735A2D97 & mask
    return x ^ (x >> 15)


def uniform(count: int, seed: int, start: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """24-bit uniform fractions in [0, 1) for entries start … start+count−1 (fp32, exact)."""
    i = torch.arange(start, start + count, dtype=torch.int64, device=device)
    key1 = mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9 ^ mix(i >> 32))
    key2 = mix(key1 ^ (seed >> 32 & 0xFFFFFFFF))
    bits = mix((mix((i & 0xFFFFFFFF) ^ key1) + key2) & 0xFFFFFFFF)
    return (bits >> 8).float() / 2**24


def compensate(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float) -> torch.Tensor:
    """u = g + decay·e, limited to the finite range (two rounded operations, no fused one)."""
    if memory is None:
        return gradient
    return torch.clamp(gradient + memory * decay, -FLOAT_MAX, FLOAT_MAX)


def sample(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float) -> torch.Tensor:
    """u at the sampled entries: runs of 64, one at a hashed place in each of 1024 equal strata.

    The place is hashed, because a fixed stride would see the same columns of a matrix again and again.
    """
    n = gradient.numel()
    if n <= SAMPLE:
        return compensate(gradient, memory, decay)
    stratum = n // SAMPLE_RUNS
    run = torch.arange(SAMPLE_RUNS, dtype=torch.int64)
    start = run * stratum + mix(run) % (stratum - RUN + 1)
    index = (start[:, None] + torch.arange(RUN)).flatten().to(gradient.device)
    return compensate(gradient[index], None if memory is None else memory[index], decay)


def moments(x: torch.Tensor) -> tuple[int, float, float]:
    """(entries that are not zero, Σ|x|, Σx²) in fp64."""
    x = x.double()
    return int(torch.count_nonzero(x)), float(x.abs().sum()), float(x.square().sum())


def absmax(x: torch.Tensor) -> float:
    """Largest magnitude; NaN or infinity if x holds one."""
    return float(x.abs().max()) if x.numel() else 0.0


def histogram(symbols: torch.Tensor, count: int) -> np.ndarray:
    return torch.bincount(symbols, minlength=count).cpu().numpy().astype(np.int64)


# ── convert ───────────────────────────────────────────────────────────────────────────────────────


def to_symbols(u: torch.Tensor, step: float, fmt: Format, seed: int | None = None) -> torch.Tensor:
    """Round to the nearest value of the format (or stochastically, with a seed), saturating; uint8 symbols."""
    y = u * inverse(step)
    magnitude = (y.abs() if fmt.sign else y.clamp(min=0)).clamp(max=fmt.largest)
    # The spacing is a power of two, constant below the smallest normal number.
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=fmt.min_exponent)
    exponent = torch.where(magnitude > 0, exponent, fmt.min_exponent)  # frexp says 0 for zero
    multiple = torch.ldexp(magnitude, fmt.mantissa - exponent)  # magnitude / spacing, exact
    if seed is None:
        rounded = torch.round(multiple)  # ties to even
    else:
        lower = torch.floor(multiple)
        rounded = lower + (uniform(u.numel(), seed, device=u.device) < multiple - lower)
    index = (exponent - fmt.min_exponent) * 2**fmt.mantissa + rounded.int()
    index = index.clamp(max=len(fmt.magnitudes) - 1)
    return (fmt.zero_symbol + torch.where(y < 0, -index, index)).to(torch.uint8)


def squared_errors(u: torch.Tensor, steps: list[float], fmt: Format) -> list[float]:
    """Σ(u − û)² for each of these steps."""
    levels = torch.from_numpy(fmt.levels)
    return [float((u.double() - dequantize(to_symbols(u, step, fmt), levels) * step).square().sum()) for step in steps]


def inverse(step: float) -> torch.Tensor:
    return torch.tensor(1, dtype=torch.float32) / torch.tensor(step, dtype=torch.float32)


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
    """Symbols of u = g + decay·e; writes e ← u − value(symbol) into memory_out."""
    u = compensate(gradient, memory, decay)
    symbols = to_symbols(u, step, fmt, seed)
    if memory_out is not None:
        torch.sub(u, dequantize(symbols, values), out=memory_out)
    return symbols


def dequantize(symbols: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.to(symbols.device)[symbols.int()]


# ── compress ──────────────────────────────────────────────────────────────────────────────────────


def pack_bits(symbols: np.ndarray, width: int) -> bytes:
    """`width` bits a symbol, from the lowest bit of each byte upwards."""
    bits = np.unpackbits(symbols[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little").tobytes()


def unpack_bits(data: memoryview, count: int, width: int, limit: int) -> np.ndarray:
    """`count` symbols, all below `limit`."""
    if len(data) != (count * width + 7) // 8:
        raise FrameError("wrong length of packed symbols")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    symbols = np.packbits(bits[: count * width].reshape(count, width), axis=1, bitorder="little").ravel()
    if bits[count * width :].any() or (count and symbols.max() >= limit):
        raise FrameError("damaged packed symbols")
    return symbols


def huffman_encode(symbols: np.ndarray, lengths: np.ndarray, codes: np.ndarray) -> bytes:
    """Concatenated codes, from the highest bit of each byte downwards."""
    words = [format(int(c), f"0{int(n)}b") if n else "" for c, n in zip(codes, lengths, strict=True)]
    bits = "".join([words[s] for s in symbols.tolist()])
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


def huffman_decode(data: memoryview, count: int, lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
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
    """Entries in every chunk but the last: equal parts, rounded up to whole rows of 64."""
    return -(-count // (chunks * CHUNK_ALIGN)) * CHUNK_ALIGN


def rans_encode_chunk(symbols: np.ndarray, frequencies: np.ndarray, precision: int, lanes: int) -> bytes:
    """One chunk: the final states, 3 bytes each, then the emitted bytes."""
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
    """Chunks of `size` entries, one after the other into `out`; returns their lengths."""
    lengths, position = [], 0
    for start in range(0, len(symbols), size):
        chunk = rans_encode_chunk(symbols[start : start + size], frequencies, precision, lanes)
        out[position : position + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        lengths.append(len(chunk))
        position += len(chunk)
    return lengths


def rans_decode(
    body: memoryview, lengths: list[int], size: int, frequencies: np.ndarray, precision: int, lanes: int,
    symbols: np.ndarray,
) -> None:  # fmt: skip
    position = 0
    for i, length in enumerate(lengths):
        part = symbols[i * size : (i + 1) * size]
        part[:] = rans_decode_chunk(body[position : position + length], len(part), frequencies, precision, lanes)
        position += length


# ── fused: None and False say "not here", and the caller composes the parts above ─────────────────


def quantize_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    fmt: Format, values: torch.Tensor, frequencies: np.ndarray, precision: int, lane_bits: int, chunks: int,
    out: torch.Tensor,
) -> tuple[list[int], int] | None:  # fmt: skip
    return None


def rans_dequantize(
    body: memoryview, lengths: list[int], size: int, frequencies: np.ndarray, precision: int, lane_bits: int,
    values: torch.Tensor, out: torch.Tensor, accumulate: bool, onto: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    return False
