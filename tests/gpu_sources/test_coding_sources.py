"""Symbols to bytes on the GPU: frequencies, rANS of every layout, plain and constant streams, checksums."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

import gradwire
from gradwire import compress, kernels
from gradwire.compress import rans
from gradwire.convert.minifloat import pack_format
from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments, Kernel
from gradwire.frame import headers
from gradwire.frame.byte_fields import bfloat16
from gradwire.gpu import structures
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.models import histogram
from gradwire.models.integer_frequencies import normalize
from gradwire.small_float_formats import PRESETS, Format
from support.device_frames import HOST, TensorTask, arrived, encode, frame_task, heavy, kernels_of, steps_of

TEST_KERNELS = r"""
extern "C" __global__ void normalize_many(const u64* counts, u32* out, i64 alphabet, i64 precision) {
    normalize(counts + 256 * blockIdx.x, out + 256 * blockIdx.x, int(alphabet), int(precision));
}

extern "C" __global__ void normalize_few(const u64* counts, u32* out, i64 alphabet, i64 precision) {
    u64 count = threadIdx.x < alphabet ? counts[256 * blockIdx.x + threadIdx.x] : 0;
    out[256 * blockIdx.x + threadIdx.x] = normalize_by_warp(count, int(alphabet), int(precision));
}

extern "C" __global__ void checksums(const u8* bytes, const i64* ranges, u32* out) {
    i64 begin = ranges[2 * blockIdx.x], length = ranges[2 * blockIdx.x + 1];
    u32 crc = block_crc(bytes + begin, length), other = threadIdx.x < 32 ? times_power_by_warp(~0u, length) : 0;
    if (!threadIdx.x) out[2 * blockIdx.x] = ~(crc ^ other), out[2 * blockIdx.x + 1] = ~(crc ^ times_power(~0u, length));
}

extern "C" __global__ void copies(const u8* bytes, const i64* ranges, u8* to, u32* out) {
    i64 begin = ranges[3 * blockIdx.x], length = ranges[3 * blockIdx.x + 1];
    u32 crc = copy_with_crc(to + ranges[3 * blockIdx.x + 2], bytes + begin, length);
    if (!threadIdx.x) out[blockIdx.x] = ~(crc ^ times_power(~0u, length));
}
"""


pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


@pytest.fixture(scope="module")
def parts() -> dict[str, Kernel]:
    """Kernels around single functions of the sources."""
    names = ("normalize_many", "normalize_few", "checksums", "copies")
    return dict(zip(names, kernels_of(programs.source_of("coding") + TEST_KERNELS, *names), strict=True))


@pytest.fixture(scope="module")
def decoder() -> MessageDecoder:
    """One for many messages, as in training."""
    return MessageDecoder(HOST)


# ── single functions ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("program", "all_of_them"), [("coding", structures.ALL), ("decoding", structures.ALL_DECODING)]
)
def test_structures_are_laid_out_alike(program: str, all_of_them: tuple[np.dtype, ...]) -> None:
    found = torch.zeros(len(all_of_them), dtype=torch.int64)
    programs.kernel(program, "sizes", HOST)(1, 1, Arguments(found))
    assert found.tolist() == [structure.itemsize for structure in all_of_them]


def counts_of_many_kinds(alphabet: int, precision: int) -> np.ndarray:
    """Return counts, one kind a row, of sums that come out too small, too large or just right, with ties or without."""
    rng, target = np.random.default_rng(alphabet * 100 + precision), 1 << precision
    ones = np.ones(alphabet, dtype=np.int64)
    rows = [ones, 3 * ones, rng.integers(0, 2, alphabet), rng.integers(1, 4, alphabet)]
    rows += [rng.integers(0, 10**k, alphabet) for k in (1, 3, 6, 9)]
    rows += [(rng.pareto(0.3, alphabet) % 1e8).astype(np.int64) for _ in range(6)]
    one_large, two_large, stairs = ones.copy(), ones.copy(), np.arange(alphabet) ** 3
    one_large[-1] = 10**10  # all others are raised to 1
    two_large[[0, alphabet // 2]] = 10**9
    rows += [one_large, two_large, stairs, stairs[::-1]]
    equal = ones.copy()
    equal[: max(2, alphabet // 3)] = 5 * target  # many that are equal and the largest
    rows += [
        equal,
        equal[::-1],
        np.where(np.arange(alphabet) % 2, 7, 0),
        np.where(rng.random(alphabet) < 0.5, 1, 10**7),
    ]
    near = np.full(alphabet, 10**6)
    near[: alphabet // 2] += 1
    rows.append(near)
    table = np.zeros((len(rows), 256), dtype=np.int64)
    for row, values in zip(table, rows, strict=True):
        row[:alphabet] = values
        row[0] += not values.any()
    return table


@pytest.mark.parametrize(
    "alphabet",
    [2, 15, 32, 57, 256, *(pytest.param(n, marks=pytest.mark.thorough) for n in (3, 31, 33, 129, 255))],
)
def test_frequencies_are_those_of_the_reference(parts: dict[str, Kernel], alphabet: int) -> None:
    for precision in (8, 11, 12, 14):
        counts = counts_of_many_kinds(alphabet, precision)
        expected = np.array([normalize(row, precision) for row in counts])
        assert bool((expected.sum(axis=1) == 1 << precision).all())
        for name, threads in (("normalize_many", 256), ("normalize_few", 32)):
            if threads >= alphabet:
                out = torch.full((len(counts), 256), -1, dtype=torch.int32)
                arguments = Arguments(torch.from_numpy(counts), out, alphabet, precision)
                parts[name](len(counts), threads, arguments)
                assert np.array_equal(out.numpy()[:, :alphabet], expected[:, :alphabet]), (name, precision)


def test_checksums_are_zlibs(parts: dict[str, Kernel]) -> None:
    """Of all lengths and alignments, and some longer ones."""
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 150_000, dtype=np.uint8))
    base = -data.data_ptr() % 16
    ranges = [(base + alignment, length) for length in range(301) for alignment in range(16)]
    ranges += [(base + i, length) for i, length in enumerate((511, 512, 513, 4095, 4096, 4097, 8192, 32768, 140_003))]
    out, where = torch.zeros(2 * len(ranges), dtype=torch.int32), torch.tensor(ranges)
    parts["checksums"](len(ranges), 128, Arguments(data, where, out))
    expected = [zlib.crc32(bytes(data[begin : begin + length].numpy())) for begin, length in ranges]
    found = (out.numpy().astype(np.int64) & 0xFFFFFFFF).reshape(-1, 2)
    assert found[:, 0].tolist() == expected
    assert found[:, 1].tolist() == expected


def test_copies_are_exact_and_know_their_checksums(parts: dict[str, Kernel]) -> None:
    """Of all alignments at both ends, and nothing beside them is written."""
    data = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 20_000, dtype=np.uint8))
    lengths = [*range(12), 509, 512, 515, 4099, 8192, 8195]
    ranges, expected, at = [], torch.full((600_000,), 0xAA, dtype=torch.uint8), 64
    for length in lengths:
        for source in range(4):
            for target in range(4):
                ranges.append((source, length, at + target))
                expected[at + target : at + target + length] = data[source : source + length]
                at += length // 64 * 64 + 128
    out, sums = torch.full_like(expected, 0xAA), torch.zeros(len(ranges), dtype=torch.int32)
    where = torch.tensor(ranges)
    parts["copies"](len(ranges), 160, Arguments(data, where, out, sums))
    assert torch.equal(out, expected)
    found = (sums.numpy().astype(np.int64) & 0xFFFFFFFF).tolist()
    assert found == [zlib.crc32(bytes(data[begin : begin + length].numpy())) for begin, length, _ in ranges]


# ── frames of the device ──────────────────────────────────────────────────────────────────────────


def device_value(decoder: MessageDecoder, spec: str, frame: bytes) -> torch.Tensor | None:
    """Return what kernels decode of a frame; None if they leave it to the host."""
    header = headers.read_header(memoryview(frame))
    out = torch.full((header.elements,), float("nan"), dtype=header.dtype)
    targets = [FrameTarget(gradwire.codec(spec).converter, [out])]
    return out if decoder.average(targets, [arrived(frame)], [[True]], 1.0).wait() else None


def layout_of(frame: bytes) -> tuple[int, int, int, int, int]:
    """Return coder, model, precision, log₂ of the lanes and chunks of a minifloat frame."""
    fmt, segments, reader = steps_of(frame)
    byte, reader_position = reader.data[reader.position], reader.position
    coding = compress.read_head(reader, fmt)
    if coding.coder is not compress.RANS:
        return byte & 3, 0, 0, 0, 0
    assert reader.position > reader_position
    lane_bits, lengths, _ = rans.read_head(reader.rest(), sum(length for length, _ in segments))
    return byte & 3, byte >> 2 & 3, byte >> 4, lane_bits, len(lengths)


def made(spec: str, gradients: list[torch.Tensor], decoder: MessageDecoder, encoder: MessageEncoder) -> set[tuple]:
    """Encode each, and check what host and device decode; returns the layouts."""
    found = set()
    for gradient in gradients:
        after = torch.empty_like(gradient)
        [frame] = encode([frame_task(spec, [TensorTask(gradient, torch.zeros_like(gradient), after)])], encoder)
        decoded = gradwire.decode(frame)
        assert torch.equal(after, gradient - decoded)
        again = device_value(decoder, spec, frame)
        assert again is not None and torch.equal(again, decoded)
        found.add(layout_of(frame))
    return found


def test_every_number_of_lanes(decoder: MessageDecoder) -> None:
    torch.manual_seed(0)
    gradients = [heavy(n) for n in (200, 1000, 2000, 4000, 9000, 14_003, 28_000, 60_001, 110_000, 140_000, 260_003)]
    found = made("co3", gradients, decoder, MessageEncoder(HOST))
    assert {lane_bits for coder, _, _, lane_bits, _ in found if coder == 3} == set(range(7))
    assert {chunks for *_, lane_bits, chunks in found if lane_bits == 6} >= {1, 2, 3}


def test_every_model_and_precision(decoder: MessageDecoder) -> None:
    torch.manual_seed(1)
    gradients = [
        torch.randn(900), heavy(900), heavy(40_000), torch.randn(40_000), heavy(40_000) * (torch.rand(40_000) < 0.02),
        torch.randint(-2, 3, (3000,)).float(), torch.rand(5000) + 1,
        torch.cat([torch.randn(9000), torch.randn(2) * 1e6]), (torch.rand(90_000) < 0.001).float(), heavy(70_000),
    ]  # fmt: skip
    coarse = made("co3", gradients, decoder, MessageEncoder(HOST))
    assert {(model, precision) for _, model, precision, *_ in coarse} >= {(1, 8), (2, 8), (2, 12)}
    fine = made("co3:format=fp8", gradients[::2], decoder, MessageEncoder(HOST))
    fine |= made("co3:format=e4m3", gradients[1::2], decoder, MessageEncoder(HOST))
    assert {precision for coder, _, precision, *_ in fine if coder == 3} >= {11, 14}
    assert {model for coder, model, *_ in fine if coder == 3} == {1, 2}


@pytest.mark.thorough
def test_a_large_stream_takes_a_coarse_table(decoder: MessageDecoder) -> None:
    torch.manual_seed(2)
    [(coder, _, precision, lane_bits, chunks)] = made("co3", [heavy(1_100_000)], decoder, MessageEncoder(HOST))
    assert (coder, precision, lane_bits) == (3, 8, 6) and chunks > 8


def test_plain_and_constant_streams(decoder: MessageDecoder) -> None:
    torch.manual_seed(3)
    few = [torch.randn(n) for n in range(1, 12)]
    constant = [torch.zeros(5), torch.zeros(70_001), torch.full((3000,), -0.3), torch.full((1,), 2.5)]
    for spec in ("co3", "co3:format=e4m3"):
        found = made(spec, (few if spec == "co3" else few[::4]) + constant, decoder, MessageEncoder(HOST))
        assert {coder for coder, *_ in found} >= {0, 1}
    for spec in ("signsgd:coder=raw", "qsgd:levels=21,coder=raw", "qsgd:levels=255,bucket=512,coder=raw"):
        for n in (7, 4097, 16_384, 40_001):
            [frame] = encode([frame_task(spec, [TensorTask(heavy(n))])])
            decoded = gradwire.decode(frame)
            again = device_value(decoder, spec, frame)
            assert again is not None and torch.equal(again, decoded)


# ── frames of the host ────────────────────────────────────────────────────────────────────────────


def rans_frame(fmt: Format, symbols: np.ndarray, precision: int, lane_bits: int, chunks: int) -> bytes:
    """Return a frame of these symbols with a layout that no encoder may choose, but any decoder has to read."""
    frequencies = normalize(np.bincount(symbols, minlength=fmt.symbols), precision)
    size = kernels.chunk_size(len(symbols), chunks)
    body = np.empty(rans.room(len(symbols), chunks) + 4096, dtype=np.uint8)
    lengths = kernels.rans_encode(symbols, size, frequencies, precision, 1 << lane_bits, body)
    payload = pack_format(fmt) + bfloat16(0.125) + bytes([3 | 2 << 2 | precision << 4])
    payload += histogram.pack(frequencies, fmt.zero_symbol) + rans.head(lane_bits, lengths)
    payload += body[: sum(lengths)].tobytes()
    start = headers.header_length((len(symbols),), len(payload))
    frame = bytearray(start) + payload
    headers.seal(memoryview(frame), headers.MINIFLOAT, torch.float32, (len(symbols),), 0, len(payload))
    return bytes(frame)


@pytest.mark.parametrize("name", ["fp4", "fp8", "e4m3"])
def test_frames_of_any_layout(decoder: MessageDecoder, name: str) -> None:
    fmt, rng = PRESETS[name], np.random.default_rng(0)
    places = rng.normal(0, fmt.symbols / 9, 5000).round() + fmt.zero_symbol
    symbols = places.clip(0, fmt.symbols - 1).astype(np.uint8)
    for precision in range(8, 15):
        for lane_bits in range(7):
            chunks = 1 + (precision + lane_bits) % 4
            count = 4096 + 61 * precision + lane_bits
            frame = rans_frame(fmt, symbols[:count], precision, lane_bits, chunks)
            decoded = device_value(decoder, f"co3:format={name}", frame)
            assert decoded is not None, (precision, lane_bits, chunks)
            assert torch.equal(decoded, gradwire.decode(frame)), (precision, lane_bits, chunks)


def test_streams_that_take_most_bytes(decoder: MessageDecoder) -> None:
    """Rare symbols alone: every lane takes two bytes a row, and windows are used up fastest."""
    fmt = PRESETS["e4m3"]
    symbols = np.tile(np.arange(fmt.symbols, dtype=np.uint8), 40)
    symbols[:600] = 3
    for precision in (8, 11, 12, 14):
        for count in (len(symbols), len(symbols) - 1, 64 * 150, 65, 1):
            frame = rans_frame(fmt, symbols[-count:], precision, 6, 1)
            decoded = device_value(decoder, "co3:format=e4m3", frame)
            assert decoded is not None and torch.equal(decoded, gradwire.decode(frame))


@pytest.mark.parametrize("spec", ["co3", "co3:format=fp8", "co3:format=e4m3"])
def test_frames_of_the_hosts_codec(decoder: MessageDecoder, spec: str) -> None:
    torch.manual_seed(4)
    for n in (9, 100, 3000, 20_000, 150_001):
        frame = gradwire.codec(spec).encode(heavy(n))
        decoded = device_value(decoder, spec, frame)
        assert decoded is not None and torch.equal(decoded, gradwire.decode(frame))


def test_frames_that_are_stored_or_of_huffman_codes_are_left_to_the_host(decoder: MessageDecoder) -> None:
    torch.manual_seed(5)
    assert device_value(decoder, "co3", gradwire.codec("none").encode(heavy(300))) is None
    assert device_value(decoder, "co3", gradwire.codec("co3:coder=huffman").encode(heavy(3000))) is None
    assert device_value(decoder, "co3", gradwire.codec("co3:format=e3m3b3").encode(heavy(3000))) is None
