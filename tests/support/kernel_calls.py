"""Calls of the native kernels that leave no corner out: golden frames, all recipes, and what vector code goes wrong at.

Whoever makes them looks at what comes of them (support/native_cases.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import gradwire
from gradwire import FrameError, codecs
from gradwire.kernels import reference
from gradwire.kernels.reference.rows import Side
from gradwire.models.integer_frequencies import normalize
from gradwire.small_float_formats import PRESETS, Format, parse_format
from support.helpers import LEVEL_SPECS, SPECS, encode_into, gradient, heavy, native

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = [*PRESETS.values(), *map(parse_format, ("e2m1", "e4m3b10", "e3m0b2", "ue3m2b5", "ue1m3b0f", "e6m1b31"))]
BAD = [math.nan, math.inf, -math.inf]


def decode_all_ways(frame: bytes) -> None:
    """To a new tensor, and added to one."""
    decoded = gradwire.decode(frame, max_elements=1 << 18)
    if decoded.is_floating_point():
        header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
        codecs.decode_payload(header, payload, torch.full_like(decoded, 0.5), 1.0, True)


def call_with_golden_frames() -> None:
    for kind in ("valid", "damaged"):
        for path in sorted((GOLDEN / kind).glob("*.frame")):
            try:
                decode_all_ways(path.read_bytes())
            except FrameError:
                assert kind == "damaged", path.stem


def call_with_all_recipes(sizes: list[int]) -> None:
    """On tensors of these sizes, with memory and without, and on one with an infinity."""
    specs = {entry.name for entry in gradwire.recipes()} | {*SPECS, *LEVEL_SPECS}
    for number, spec in enumerate(sorted(specs)):
        codec = gradwire.codec(spec)
        for count in sizes:
            tensor = heavy(count, number) if spec.startswith("ecq") else gradient(count, number)
            tensor[1:2] = -0.0
            memory = gradient(count, number + 1)
            decode_all_ways(encode_into(codec, tensor, residual=memory, decay=0.9))
            decode_all_ways(encode_into(codec, tensor))
        tensor[count // 2] = math.inf
        encode_into(codec, tensor, residual=memory, decay=0.9)


Rng = np.random.Generator


def call_with_shapes() -> None:
    """Smooth kernels, a matrix of low rank with rows of unlike scales, and blocks, of which the last is cut off."""
    smooth = [gradient(40 * 16, 1).view(40, 16, *[1] * len(axes)).expand(40, 16, *axes) for axes in ((3, 3), (5,))]
    low_rank = torch.outer(gradient(96, 2) * torch.logspace(-2, 1, 96), gradient(128, 3))
    low_rank *= smooth[0].std() / low_rank.std()
    for seed, pattern in enumerate([*smooth, low_rank, torch.zeros(5000)]):
        tensor = pattern + 0.01 * gradient(pattern.numel(), seed).view(pattern.shape)
        for spec in ("structured", "structured:nmse=0.2,rank=0"):
            memory = 0.01 * gradient(tensor.numel(), seed + 1)
            decode_all_ways(encode_into(gradwire.codec(spec), tensor, residual=memory, decay=0.9))


def call_with_large_tensors() -> None:
    """Tensors large enough to be sampled: a matrix of which most is predicted, and one without a prediction."""
    gradwire.codec("co3").encode(gradient(70_001))
    matrix = torch.outer(gradient(280, 2), gradient(256, 3)) + 0.01 * gradient(280 * 256, 4).view(280, 256)
    for spec in ("structured", "structured:rank=0"):
        gradwire.codec(spec).encode(matrix)


def a_table(rng: Rng, size: int, precision: int) -> np.ndarray:
    """Frequencies: some zero, or one of nearly all."""
    frequencies = rng.multinomial(2**precision, rng.dirichlet([rng.choice([0.01, 0.2, 1.0, 50.0])] * size))
    if rng.random() < 0.3:
        few = rng.permutation(size)[: rng.integers(1, size + 1)]
        frequencies = np.zeros(size, dtype=np.int64)
        frequencies[few] = 1
        frequencies[few[0]] = 2**precision - len(few) + 1
    return frequencies


def entries(rng: Rng, count: int, step: float, magnitudes: np.ndarray) -> torch.Tensor:
    """Smooth values, ties, zeros of both signs, the ends of fp32."""
    ties = np.concatenate([magnitudes, (magnitudes[:-1] + magnitudes[1:]) / 2])
    ends = [0.0, 1e-45 / step, 1e-38 / step, 1e9, reference.FLOAT_MAX / step]
    kinds = [rng.laplace(size=count) * rng.choice(magnitudes, count), rng.choice(ties, count), rng.choice(ends, count)]
    values = np.choose(rng.choice(3, count, p=[0.6, 0.38, 0.02]), kinds) * rng.choice([-1.0, 1.0], count) * step
    return torch.from_numpy(values.clip(-reference.FLOAT_MAX, reference.FLOAT_MAX).astype(np.float32))


def memories(rng: Rng, tensor: torch.Tensor, step: float) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory in and out: none of either, one of them, both, or the same for both."""
    noise = (rng.standard_normal(len(tensor)) * step * rng.choice([0.3, 10.0])).clip(-1e38, 1e38)
    memory = torch.from_numpy(noise.astype(np.float32))
    out = torch.full_like(tensor, 7.0)
    choices = [(None, None), (None, out), (memory, None), (memory, out), (memory, memory)]
    return choices[rng.integers(5)]


def spoiled(rng: Rng, tensor: torch.Tensor) -> torch.Tensor:
    """Now and then with an entry that is not finite."""
    if rng.random() < 0.2:
        tensor[rng.integers(len(tensor))] = rng.choice(BAD)
    return tensor


def a_step(rng: Rng) -> float:
    return float(np.float32(2.0 ** rng.choice([0, rng.uniform(-30, 30), -126, 126])))


def call_small_floats(rng: Rng) -> None:
    fmt: Format = PRESETS["fp4"] if rng.random() < 0.5 else FORMATS[rng.integers(len(FORMATS))]
    count, step = int(rng.integers(1, 1500)), a_step(rng)
    tensor = entries(rng, count, step, np.sort(np.abs(fmt.levels)))
    decay = float(rng.choice([0.0, 0.7, 1.0]))
    with np.errstate(over="ignore"):
        values = torch.from_numpy((fmt.levels * step).clip(-reference.FLOAT_MAX, reference.FLOAT_MAX).astype("f4"))
    seed = None if rng.random() < 0.7 else int(rng.integers(2**63))
    symbols = native.quantize(tensor, *memories(rng, tensor, step), decay, step, fmt, values, seed)
    native.squared_errors(tensor, [step, step / 2], fmt)
    native.absmax(spoiled(rng, tensor.clone()))
    native.moments(tensor)
    lengths = np.diff(np.unique([0, count // 3, count // 2, count]))
    steps, rows = np.full(len(lengths), step), torch.stack([values] * len(lengths))
    native.segment_moments(tensor, lengths)
    native.sample_segments(tensor, memories(rng, tensor, step)[0], decay, lengths)
    native.better_steps(tensor, lengths, steps, steps[:, None] * [[2.0, 0.5]], 64, 0.98, fmt)
    native.quantize_segments(tensor, *memories(rng, tensor, step), decay, lengths, steps, fmt, rows, seed)
    precision, lane_bits, chunks = int(rng.integers(8, 15)), int(rng.integers(7)), int(rng.integers(1, 4))
    frequencies = normalize(20 * np.bincount(symbols.numpy(), minlength=fmt.symbols) + 1, precision)
    size = reference.chunk_size(count, chunks)
    room = 2 * count + (3 << lane_bits) * -(-count // size) + 64
    tensor, out = spoiled(rng, tensor), torch.zeros(room, dtype=torch.uint8)
    native.quantize_rans(
        tensor, *memories(rng, tensor, step), decay, step, fmt, values, frequencies, precision, lane_bits, chunks, out
    )
    call_rans(rng, symbols.numpy(), frequencies, precision, 1 << lane_bits, values)


def call_rans(
    rng: Rng, symbols: np.ndarray, frequencies: np.ndarray, precision: int, lanes: int, values: torch.Tensor
) -> None:
    """A chunk there and back: as symbols, values and sums, and damaged."""
    table = frequencies, precision, lanes
    chunk = native.rans_encode_chunk(symbols, *table)
    assert native.rans_decode_chunk(memoryview(chunk), len(symbols), *table).tobytes() == symbols.tobytes()
    out = gradient(len(symbols))
    for data in (chunk, damaged(rng, chunk, lanes)):
        for accumulate in (False, True):
            arguments = memoryview(data), [len(data)], len(symbols), frequencies, precision, lanes.bit_length() - 1
            try:
                native.rans_dequantize(*arguments, values, out, accumulate)
            except FrameError:
                assert data is not chunk


def damaged(rng: Rng, chunk: bytes, lanes: int) -> bytes:
    """Flipped bits, a cut, more bytes, or random ones behind states that are valid."""
    changed = bytearray(chunk)
    match rng.integers(4):
        case 0:
            changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
        case 1:
            del changed[rng.integers(len(changed)) :]
        case 2:
            place = int(rng.integers(3 * lanes, len(changed) + 1))
            changed[place:place] = rng.bytes(rng.integers(1, 80))
        case _:
            states = rng.integers(2**14, 2**22, size=lanes)
            changed[: 3 * lanes] = b"".join(int(x).to_bytes(3, "little") for x in states)
            changed[3 * lanes :] = rng.bytes(rng.integers(2 * len(changed)))
    return bytes(changed)


def call_tables(rng: Rng) -> None:
    size = int(rng.choice([2, 3, 11, 15, 16, 17, 255]))
    precision, lanes = int(rng.integers(8, 15)), int(2 ** rng.integers(7))
    frequencies = a_table(rng, size, precision)
    weights = frequencies if rng.random() < 0.5 else frequencies > 0  # or: the rare ones emit two bytes all the time
    count = int(rng.choice([rng.integers(1, 2 * lanes + 1), rng.integers(1, 1500)]))
    symbols = rng.choice(size, size=count, p=weights / weights.sum()).astype(np.uint8)
    call_rans(rng, symbols, frequencies, precision, lanes, gradient(size, size))
    native.crc32(memoryview(symbols)[int(rng.integers(count)) :], int(rng.integers(2**32)))


def call_grids(rng: Rng) -> None:
    count, largest, step = int(rng.integers(1, 900)), int(rng.choice([1, 3, 7, 8, 127])), a_step(rng)
    shift = float(rng.choice([0.0, 0.125, 0.5, 0.375, 1.0]))
    tensor = entries(rng, count, step, np.sort(np.abs(np.arange(12) - shift)))
    values = torch.from_numpy((rng.standard_normal(2 * largest + 1) * min(step, 1e30)).astype(np.float32))
    values[largest] = 0
    capacity, decay = int(rng.choice([0, 3, 60, 10_000])), float(rng.choice([0.3, 1.0]))
    seed = None if rng.random() < 0.5 else int(rng.integers(2**63))
    arguments = decay, step, shift, values
    native.grid_quantize(tensor, *memories(rng, tensor, step), *arguments, capacity, seed)
    lengths = np.diff(np.unique([0, count // 3, count // 2, count]))
    rows = torch.stack([values * (i + 1) for i in range(len(lengths))])
    steps = np.array([step * (i + 1) for i in range(len(lengths))])
    native.grid_quantize_segments(tensor, *memories(rng, tensor, step), decay, lengths, steps, shift, rows)
    precision, lane_bits, chunks = int(rng.integers(8, 15)), int(rng.integers(7)), int(rng.integers(1, 4))
    frequencies = normalize(rng.integers(1, 100, 2 * largest + 1), precision)
    out, tensor = torch.zeros(2 * count + 10_000, dtype=torch.uint8), spoiled(rng, tensor)
    offset = None if rng.random() < 0.5 else float(np.float32(rng.uniform(-0.5, 0.5)))
    coding = frequencies, precision, lane_bits, chunks, out
    native.grid_rans(tensor, *memories(rng, tensor, step), *arguments, offset, capacity, *coding)


def call_levels(rng: Rng) -> None:
    count, levels = int(rng.integers(1, 1500)), int(rng.choice([2, 3, 5, 9, 15, 16, 17, 32, 40, 255]))
    cuts = np.unique(rng.integers(1, count + 1, rng.integers(4)))
    starts = np.unique(np.concatenate([[0], cuts, [count]])).astype(np.int64)
    tensor = gradient(count, count, scale=1.0)
    tensor[::7] = tensor[0].round()
    values = torch.from_numpy(np.sort(rng.standard_normal((len(starts) - 1, levels)).astype(np.float32)))
    seed = None if rng.random() < 0.6 else int(rng.integers(2**63))
    native.bucket_stats(tensor, None, 1.0, starts)
    for method, most in (("greedy", 5), ("two", 2), ("pair", 2)):
        native.search_levels(tensor, None, 1.0, starts, None, most, method)
    if rng.random() < 0.2:
        tensor[rng.integers(count)] = rng.choice(BAD[1:])
    memory, memory_out = memories(rng, tensor, 1.0)
    symbols, _ = native.assign_levels(tensor, memory, memory_out, 0.9, values, starts, seed)
    symbols = symbols.numpy() if isinstance(symbols, torch.Tensor) else symbols
    for accumulate in (False, True):
        native.spread_levels(symbols, values, starts, gradient(count), accumulate)
    any_symbols = rng.integers(256, size=count).astype(np.uint8)
    native.spread_levels(any_symbols, values, starts, gradient(count), False)


def call_selections(rng: Rng) -> None:
    count = int(rng.choice([rng.integers(1, 100), rng.integers(1, 9000), 20_000]))
    tensor = gradient(count, count, beta=float(rng.choice([0.4, 2.0])))
    if rng.random() < 0.5:
        tensor = (tensor * 2000).round() / 2000  # many ties and zeros
    memory, memory_out = memories(rng, tensor, 1e-3)
    tensor = spoiled(rng, tensor) if rng.random() < 0.5 else tensor
    wanted = None if rng.random() < 0.2 else int(rng.integers(1, count + 1) * rng.choice([1.0, 0.05])) or 1
    low = int(rng.choice([1, np.float32(1e-3).view(np.uint32)]))
    native.select(tensor, memory, memory_out, 0.9, wanted, low, bool(rng.integers(2)))
    places = torch.from_numpy(np.unique(rng.integers(0, count, size=int(rng.integers(1, 40)))))
    native.replace(torch.zeros(count, dtype=torch.float32), places, gradient(len(places), 3))


def call_sketches(rng: Rng) -> None:
    count, rows, seed = int(rng.choice([7, 3000, 40_000])), int(rng.choice([1, 3, 5, 7])), int(rng.integers(2**63))
    u = gradient(count, count)
    if rng.random() < 0.3:
        u = (u * 100).round()  # many ties and zeros
    cells = native.sketch_cells(u, rows, max(1, count // 20), seed).float()
    kept = int(rng.integers(1, count + 1) * rng.choice([1.0, 0.01])) or 1
    native.sketch_largest((cells.half() if rng.random() < 0.5 else cells).numpy(), count, kept, seed)


def call_rows(rng: Rng) -> None:
    count, widths = int(rng.integers(1, 9)), rng.integers(1, 50, 2)
    dtypes = [[torch.float32, torch.bfloat16][rng.integers(2)] for _ in range(2)]
    remembers, centred = rng.integers(2), rng.integers(2)

    def matrix(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32)).to(dtype)

    sides = [
        Side(
            rows=matrix(count, width, dtype), memory=matrix(count, width, dtype) if remembers else None, scale=0.7,
            gain=1.3, most=1e30, mean=matrix(1, width, dtype)[0] if centred else None,
        )
        for width, dtype in zip(widths, dtypes, strict=True)
    ]  # fmt: skip
    scores = native.join_rows(*sides, 0.9)
    chosen = native.largest(scores, int(rng.integers(1, count + 1)))
    native.take_rows(*sides, chosen, scores.sum())


def call_homomorphic(rng: Rng) -> None:
    lanes, words, seed = int(rng.choice([1, 4, 16])), int(rng.integers(100, 3000)), int(rng.integers(2**32))
    positions = torch.from_numpy(np.unique(rng.integers(words, size=60)))
    values = torch.from_numpy(rng.integers(-100, 100, len(positions)).astype(np.int32))
    blocks, shape = -(-words // lanes), (8, 4, seed)
    bitmap = native.index_bitmap(positions, lanes, blocks)
    assert native.count_bits(bitmap) == native.count_blocks(positions, (lanes,))[0]
    native.bloom_query(native.bloom_build(bitmap, 20, 5, seed), blocks, 5, seed)
    native.peel(bitmap, native.sketch_words(positions, values, lanes, *shape), words, lanes, *shape)
    native.align_words(bitmap, words, lanes, positions, values)
    tensor, stochastic = gradient(words, words, scale=1.0), None if rng.random() < 0.5 else seed
    native.quantize_values(tensor, 0.125, 100, stochastic)
    tensor[rng.random(words) < 0.5] = 0
    native.quantize_all(tensor, *memories(rng, tensor, 1.0), 0.9, 0.125, 7, int(rng.choice([4, 8, 16])), stochastic)


def call_classes(rng: Rng) -> None:
    from gradwire.kernels.cpu import structure  # there is none without the native module

    rows, columns, rank = (int(n) for n in rng.integers(1, 40, 3))
    scales = tuple(rng.integers(0, 6, n).astype(np.int16) for n in (rows, columns, 1))
    counts = reference.class_counts(scales, 3, 5, rows * columns)
    symbols = torch.from_numpy(rng.integers(0, 200, rows * columns).astype(np.uint8))
    streams = reference.split_classes(symbols, scales, 3, counts)
    positions = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    structure.merge_classes(streams, positions, np.zeros(5, dtype=np.uint8), scales, 3, 0, rows * columns)
    left = torch.from_numpy(rng.standard_normal((rows, rank)).astype(np.float32))
    right = torch.from_numpy(rng.integers(-127, 128, (rank, columns)).astype(np.int8))
    structure.add_prediction(torch.zeros(rows * columns, dtype=torch.float32), (left, right), 0, -1.0)


CORNERS: list[Callable[[Rng], None]] = [
    call_small_floats, call_tables, call_grids, call_levels, call_selections, call_sketches, call_rows,
    call_homomorphic, call_classes,
]  # fmt: skip


def call_corners(seed: int, times: int) -> None:
    """Every kind of corner so many times."""
    for kind, corner in enumerate(CORNERS):
        for time in range(times):
            corner(np.random.default_rng([seed, kind, time]))
