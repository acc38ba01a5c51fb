"""Golden frames of codec 8 (structured), for make_golden.py."""

from __future__ import annotations

import torch

import gradwire
from golden_families import name_of, numbers
from support.helpers import FLOATS, assemble
from support.plain_coders import plain_varint

CODEC = 8
STEP_1, LARGEST, SMALLEST = bytes([0x80, 0x3F]), bytes([0x80, 0x7E]), bytes([0x80, 0x00])  # 1, 2¹²⁶, 2⁻¹²⁶
CONSTANT = 1
SEGMENTED = 2


def scaled(rows: int, columns: int) -> torch.Tensor:
    """Rows and columns of many scales."""
    scales = 2.0 ** (torch.arange(rows) % 7)[:, None] * 2.0 ** (torch.arange(columns) % 5)
    return numbers(rows * columns).reshape(rows, columns) * scales


def smooth(rows: int, columns: int, *axes: int) -> torch.Tensor:
    """Kernels that are nearly constant."""
    levels = numbers(rows * columns, 1).reshape(rows, columns, *[1] * len(axes))
    return levels + 0.02 * numbers(rows * columns * torch.Size(axes).numel(), 2).reshape(rows, columns, *axes)


def low_rank(rows: int, columns: int) -> torch.Tensor:
    """Two directions and little else."""
    product = numbers(2 * rows, 3).reshape(rows, 2) @ numbers(2 * columns, 4).reshape(2, columns)
    return product + 0.05 * product.abs().max() * numbers(rows * columns, 5).reshape(rows, columns)


def valid() -> dict[str, bytes]:
    codec, frames = gradwire.codec("structured"), {}
    for dtype in FLOATS:
        name = name_of(dtype)
        frames[f"structured-matrix-{name}"] = codec.encode(scaled(30, 20).to(dtype))
        frames[f"structured-kernels-{name}"] = codec.encode(smooth(12, 3, 3, 3).to(dtype))
        frames[f"structured-rank-{name}"] = codec.encode(low_rank(50, 40).to(dtype))
    frames["structured-blocks"] = codec.encode(scaled(150, 30).reshape(-1))
    frames["structured-kernels-1d"] = codec.encode(smooth(20, 3, 5))
    frames["structured-kernels-3d"] = codec.encode(smooth(9, 2, 2, 3, 2))
    frames["structured-kernels-16"] = codec.encode(smooth(2, 2, 16, 16))
    frames["structured-zeros"] = codec.encode(torch.zeros(6, 70))
    frames["structured-outliers"] = codec.encode(scaled(30, 20).index_fill(0, torch.tensor([7]), 1e-9) ** 9)
    return frames | {f"structured-{name}": frame for name, frame in written().items()}


def matrix(remainder: bytes, terms: bytes = b"\0", shape: tuple[int, ...] = (40, 40), flags: int = 0) -> bytes:
    return assemble(bytes([1]) + terms + remainder, shape, CODEC, flags=flags)


def field(*data: int) -> bytes:
    return plain_varint(len(data)) + bytes(data)


def term(scale: bytes = STEP_1, most: int = 1, symbol: int = 2) -> bytes:
    return scale + bytes([most]) + field(CONSTANT, symbol)


def remainder(
    largest: int = 2, offsets: bytes = b"\0", step: bytes = STEP_1, classes: bytes = b"\1", outliers: bytes = b"",
    streams: bytes | None = None, length: int | None = None,
) -> bytes:  # fmt: skip
    streams = bytes([2]) + field(CONSTANT, 3) if streams is None else streams
    length = len(outliers) if length is None else length
    return bytes([largest]) + offsets + step + classes + plain_varint(length) + streams + outliers


def two_classes(base: int = 0, top: int = 3, symbol: int = 3) -> bytes:
    """Rows of one scale, and columns of none."""
    return bytes([2, base, top]) + field(CONSTANT, symbol) + b"\0"


def written() -> dict[str, bytes]:
    """What no encoder writes."""
    odd = bytes([3, 5, 250, 127])  # three offsets
    return {
        "terms-only": matrix(b"\0", bytes([1]) + term()),
        "terms-cancel": matrix(b"\0", bytes([2]) + term(LARGEST, 127, 254) + term(LARGEST, 127, 0)),
        "terms-smallest": matrix(remainder(), bytes([2]) + term(SMALLEST) + term(SMALLEST, 127, 5)),
        "class-clipped": matrix(remainder(classes=two_classes())),
        "class-below-base": matrix(remainder(classes=two_classes(base=255))),
        "class-of-zeros": matrix(remainder(streams=b"\0")),
        "offsets": matrix(remainder(offsets=odd)),
        "outliers-listed": matrix(remainder(streams=b"\0", outliers=bytes([2, 0, 0, 0b00110101, 0b1]))),
        "largest-step": matrix(remainder(step=LARGEST, offsets=odd)),
    }


def damaged() -> dict[str, tuple[bytes, str]]:
    kernels, blocks = bytes([2, 0]), bytes([0, 4, 0])
    frames = {
        "view-3": (assemble(bytes([3, 0, 0]), (20, 20), CODEC), "invalid view"),
        "matrix-of-a-vector": (matrix(b"\0", shape=(400,)), "invalid view"),
        "matrix-too-wide": (matrix(b"\0", shape=(63, 1 << 17)), "invalid view"),
        "matrix-too-narrow": (matrix(b"\0", shape=(1 << 17, 15)), "invalid view"),
        "kernels-of-a-matrix": (assemble(kernels + b"\0", (20, 20), CODEC), "invalid view"),
        "kernels-of-one": (assemble(kernels + b"\0", (20, 20, 1), CODEC), "invalid view"),
        "kernels-17": (assemble(kernels + b"\0", (20, 2, 17), CODEC), "invalid view"),
        "kernels-too-large": (assemble(kernels + b"\0", (2, 2, 16, 16, 16, 2), CODEC), "invalid view"),
        "block-3": (assemble(bytes([0, 3, 0, 0]), (400,), CODEC), "invalid length of a block"),
        "block-13": (assemble(bytes([0, 13, 0, 0]), (400,), CODEC), "invalid length of a block"),
        "blocks-with-rank": (assemble(bytes([0, 4, 1]) + term() + b"\0", (400,), CODEC), "blocks have no prediction"),
        "rank-beyond": (matrix(b"\0", bytes([2]) + term() * 2, (16, 16)), "invalid rank"),
        "rank-33": (matrix(b"\0", bytes([33]) + term() * 33, (999, 999)), "invalid rank"),
        "term-scale-0": (matrix(b"\0", bytes([1]) + term(bytes(2))), "invalid factors"),
        "term-scale-inf": (matrix(b"\0", bytes([1]) + term(bytes([0x80, 0x7F]))), "invalid factors"),
        "term-m-0": (matrix(b"\0", bytes([1]) + term(most=0)), "invalid factors"),
        "term-m-128": (matrix(b"\0", bytes([1]) + term(most=128)), "invalid factors"),
        "term-symbol-beyond": (matrix(b"\0", bytes([1]) + term(symbol=3)), "invalid constant"),
        "term-cut": (matrix(b"", bytes([1]) + term()[:-1]), "cut short"),
        "byte-more": (matrix(b"\0\0"), "bytes after the end"),
        "nothing": (assemble(b"", (20, 20), CODEC), "cut short"),
        "no-remainder": (matrix(b""), "cut short"),
        "largest-128": (matrix(remainder(largest=128)), "invalid"),
        "offsets-16": (matrix(remainder(offsets=bytes([16] + [0] * 16))), "invalid"),
        "step-0": (matrix(remainder(step=bytes(2))), "invalid step"),
        "classes-0": (matrix(remainder(classes=b"\0")), "invalid number of classes"),
        "classes-33": (matrix(remainder(classes=bytes([33, 0, 0, 0]))), "invalid number of classes"),
        "scales-64": (matrix(remainder(classes=two_classes(top=64))), "invalid scales"),
        "scale-beyond": (matrix(remainder(classes=two_classes(symbol=4))), "invalid constant"),
        "class-beyond": (matrix(remainder(streams=bytes([3]) + field(CONSTANT, 3))), "invalid class"),
        "class-symbol-beyond": (matrix(remainder(streams=bytes([2]) + field(CONSTANT, 5))), "invalid constant"),
        "class-cut": (matrix(remainder(streams=bytes([2, 3, CONSTANT, 3]))), "cut short"),
        "outliers-too-long": (matrix(remainder(length=1)), "wrong length of the outliers"),
        "outliers-too-short": (matrix(remainder(length=0, outliers=b"\1\0\0\3")), "wrong length of the outliers"),
        "outliers-too-many": (matrix(remainder(outliers=bytes([40, 0, 0] + [255] * 8))), "invalid outliers"),
        "int32": (assemble(blocks + b"\0", (400,), CODEC, torch.int32), "always stored"),
        "of-nothing": (assemble(blocks + b"\0", (0,), CODEC), "always stored"),
        "segmented": (matrix(b"\0", flags=SEGMENTED), "has no segments"),
    }
    return {f"structured-{name}": each for name, each in frames.items()}
