"""Golden frames of codec 7 (homomorphic), for make_golden.py."""

from __future__ import annotations

import struct

import torch

import gradwire
from golden_families import name_of, numbers
from support.helpers import FLOATS, assemble
from support.plain_coders import plain_varint
from support.plain_homomorphic import plain_cells, plain_mix

DENSE, BITMAP, BLOOM = range(3)
SEGMENTED = 2


def runs(count: int, every: int, length: int) -> torch.Tensor:
    """Numbers in runs, and zeros between them."""
    return torch.where(torch.arange(count) % every < length, numbers(count), 0)


def valid() -> dict[str, bytes]:
    frames = {}
    for bits in (32, 16, 8, 4):
        codec = gradwire.codec(f"homomorphic:p=all,bits={bits}")
        for dtype in FLOATS:
            frames[f"homomorphic-dense-{bits}-{name_of(dtype)}"] = codec.encode(numbers(77).to(dtype))
        frames[f"homomorphic-sparse-{bits}"] = codec.encode(runs(600, 100, 1))
        frames[f"homomorphic-runs-{bits}"] = codec.encode(runs(700, 700, 64))
    frames["homomorphic-stochastic"] = gradwire.codec("homomorphic:p=all,bits=8,rounding=stochastic").encode(
        numbers(90)
    )
    frames["homomorphic-topk"] = gradwire.codec("homomorphic:p=0.002").encode(numbers(4096).reshape(64, 64))
    frames["homomorphic-zeros"] = gradwire.codec("homomorphic").encode(torch.zeros(10, 50))
    for lanes in (1, 4, 16):
        frames[f"homomorphic-bitmap-{lanes}"] = assemble(payload(lanes=lanes), (99,), 7)
        frames[f"homomorphic-bloom-{lanes}"] = assemble(payload(BLOOM, lanes=lanes), (99,), 7)
    frames["homomorphic-saturated"] = assemble(payload(step=1e38, words=(3,)), (99,), 7, torch.float16)
    frames["homomorphic-seed"] = assemble(payload(seed=2**32 - 1), (99,), 7)
    return frames


def payload(
    index: int = BITMAP, lanes: int = 1, width: int = 0, step: float = 0.5, seed: int = 5, segments: int = 6,
    log: int = 3, block: int = 2, words: tuple[int, ...] = (7,), probes: int = 3, extra: bytes = b"",
    bits: int | None = None, kind: int | None = None,
) -> bytes:  # fmt: skip
    """99 entries of 32 bits; one block is sent, and its first words."""
    blocks, cells = -(-99 // lanes), [[0] * lanes for _ in range(segments << log)]
    for cell in plain_cells(block, segments, log, seed) if segments > 3 else ():
        cells[cell][: len(words)] = words
    side = bytes([index | (1, 4, 16).index(lanes) << 2 | width << 4 if kind is None else kind]) + struct.pack(
        "<f", step
    )
    side += struct.pack("<I", seed) + plain_varint(segments) + bytes([log])
    if index == BLOOM:
        index_words = bloom(block, probes, seed)
        side += plain_varint(len(index_words)) + bytes([probes])
    else:
        index_words = [0] * (-(-blocks // 32))
        index_words[0] = 1 << block if bits is None else bits
    body = [*index_words, *(word for cell in cells for word in cell)]
    return side + struct.pack(f"<{len(body)}I", *body) + extra


def bloom(block: int, probes: int, seed: int) -> list[int]:
    """A filter of two words that holds one block, and some others by mistake."""
    words, hashed = [0, 0], plain_mix(block // 32 ^ plain_mix(seed ^ 0x85EBCA6B))
    for i in range(probes):
        h = plain_mix((hashed + i * 0x9E3779B9) % 2**32)
        words[h * 2 // 2**32] |= 1 << (block + h) % 32
    return words


Damaged = dict[str, tuple[bytes, str]]


def damaged() -> Damaged:
    def frame(data: bytes, flags: int = 0) -> bytes:
        return assemble(data, (99,), 7, flags=flags)

    kinds = {"index-3": 3, "lanes-3": 1 | 3 << 2, "bits-4": 1 | 4 << 4, "bit-7": 0x81}
    frames = {f"homomorphic-{name}": (frame(payload(kind=kind)), "unknown kind") for name, kind in kinds.items()}
    for name, step in {"zero": 0.0, "negative": -1.0, "nan": float("nan"), "inf": float("inf"), "tiny": 1e-40}.items():
        frames[f"homomorphic-step-{name}"] = (frame(payload(step=step)), "invalid step")
    wrong = {
        "segments-3": payload(segments=3), "segment-17": payload()[:10] + bytes([17]) + payload()[11:],
        "probes-0": payload(BLOOM, probes=0), "probes-25": payload(BLOOM, probes=25),
    }  # fmt: skip
    frames |= {f"homomorphic-{name}": (frame(data), "no such homomorphic code") for name, data in wrong.items()}
    dense = bytes([0]) + struct.pack("<f", 1.0) + bytes(4 * 99)
    return frames | {
        "homomorphic-not-in-index": (frame(payload(bits=0)), "cannot be peeled"),
        "homomorphic-beyond": (frame(payload(lanes=4, block=24, words=(0, 0, 0, 1))), "cannot be peeled"),
        "homomorphic-long": (frame(payload(extra=bytes(4))), "wrong length"),
        "homomorphic-short": (frame(payload()[:-4]), "wrong length"),
        "homomorphic-dense-long": (frame(dense + b"0"), "wrong length"),
        "homomorphic-dense-lanes": (frame(bytes([4]) + dense[1:]), "no such homomorphic code"),
        "homomorphic-int32": (assemble(dense, (99,), 7, torch.int32), "always stored"),
        "homomorphic-of-nothing": (assemble(dense, (0,), 7), "always stored"),
        "homomorphic-segmented": (frame(dense, SEGMENTED), "has no segments"),
        "homomorphic-empty": (frame(b""), "cut short"),
        "homomorphic-cut": (frame(payload()[:7]), "cut short"),
    }
