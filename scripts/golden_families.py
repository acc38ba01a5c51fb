"""Golden frames of the codecs 3 to 6 (grid, levels, sparse, count-sketch), for make_golden.py."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

import gradwire
from support.helpers import FLOATS, assemble, encode_into
from support.plain_coders import plain_gammas, plain_varint
from support.plain_decoder import GRID, LEVELS, SPARSE, plain_decode

RAW, CONSTANT, HUFFMAN, RANS = 0, 1, 2, 3
STEP_1, ONE = bytes([0x80, 0x3F]), struct.pack("<f", 1.0)
SEGMENTED = 2
Damaged = dict[str, tuple[bytes, str]]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def slug(spec: str) -> str:
    return spec.replace(":", "-").replace("=", "-").replace(",", "-")


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    """Laplacian numbers, as gradients are, without a random generator."""
    x = (torch.arange(1, count + 1, dtype=torch.int64) + 1000 * seed) * 2654435761 % 2**32
    u = (2 * x.double() + 1) / 2**32 - 1
    return (u.sign() * -torch.log(1 - u.abs()) * 0.01).float()


def of_specs(number: int, specs: list[str], dtypes: list[str], tensor: torch.Tensor) -> dict[str, bytes]:
    """A frame of each spec in fp32, and of some in all dtypes."""
    frames = {}
    for spec in specs:
        for dtype in FLOATS if spec in dtypes else FLOATS[:1]:
            frame = gradwire.codec(spec).encode(tensor.to(dtype), seed=7)
            assert plain_decode(frame).codec == number, spec
            frames[f"{slug(spec)}-{name_of(dtype)}"] = frame
    return frames


def packed(codes: str) -> bytes:
    """Bits as they are read, from the lowest of each byte upwards."""
    codes = codes.replace(" ", "")
    codes += "0" * (-len(codes) % 8)
    return bytes(int(codes[i : i + 8][::-1], 2) for i in range(0, len(codes), 8))


def outlier(gap: int, negative: int, excess: int, a: int = 0, b: int = 0) -> str:
    """Its code, bit by bit."""
    v = (excess >> b) + 1
    rice = "0" * (gap >> a) + "1" + low_bits(gap, a)
    return (
        rice + str(negative) + "0" * (v.bit_length() - 1) + "1" + low_bits(v, v.bit_length() - 1) + low_bits(excess, b)
    )


def low_bits(number: int, count: int) -> str:
    return "".join(str(number >> i & 1) for i in range(count))


# ── valid ─────────────────────────────────────────────────────────────────────────────────────────


def valid() -> dict[str, bytes]:
    return {**grid(), **levels(), **sparse(), **sketch()}


def grid_payload(
    symbols: bytes, largest: int = 2, offsets: bytes = b"", side: bytes = STEP_1, outliers: bytes = b""
) -> bytes:
    head = bytes([largest, len(offsets)]) + offsets + side
    return head + plain_varint(len(outliers)) + symbols + outliers


def grid() -> dict[str, bytes]:
    specs = ["ecq", "ecq:rate=0.4", "ecq:rate=3", "ecq:nmse=0.01", "ecq:rate=3,rounding=stochastic"]
    frames = of_specs(GRID, specs, specs[:2], numbers(120))
    heavy = numbers(200).where(torch.arange(200) % 80 > 0, 1000 * numbers(200, 1))
    frames["ecq-outliers"] = gradwire.codec("ecq").encode(heavy)
    assert plain_decode(frames["ecq-outliers"]).positions
    frames["ecq-zeros"] = gradwire.codec("ecq").encode(torch.zeros(3, 15))
    frames["ecq-largest"] = gradwire.codec("ecq:rate=2").encode(numbers(20).sign() * 3e38)
    for dtype in FLOATS:
        tensor = torch.cat([heavy, 100 * numbers(20, 1), torch.zeros(10), numbers(1, 2)]).to(dtype)
        frames[f"ecq-segmented-{name_of(dtype)}"] = encode_into(
            gradwire.codec("ecq"), tensor, segments=[200, 20, 10, 1]
        )
    huffman = bytes([HUFFMAN | 2 << 2 | 8 << 4]) + plain_gammas([32, 64, 16, 16])  # 128 are left for zero
    by_hand = {
        "raw": (grid_payload(bytes([RAW]) + packed("000 100 010 110 001")), (5,)),
        "huffman": (grid_payload(huffman + bytes([0b0101_1011, 0b1011_1100])), (6,)),
        "constant-offset": (grid_payload(bytes([CONSTANT, 0]), 2, bytes([128, 127])), (4,)),
        "offsets-15": (grid_payload(bytes([RAW]) + bytes(range(97, 157)), 127, bytes(range(120, 135))), (60,)),
        "outliers": (
            grid_payload(bytes([CONSTANT, 2]), 2, b"\x40", outliers=bytes([3, 0, 0]) + packed(
                outlier(0, 0, 0) + outlier(0, 1, 3) + outlier(2, 0, 2**24 - 3))),
            (5,),
        ),
        "outlier-widest-parameters": (
            grid_payload(bytes([CONSTANT, 1]), 1, outliers=bytes([1, 48, 24]) + packed(outlier(4, 1, 9, 48, 24))), (6,)
        ),
        "segmented-empty": (
            grid_payload(bytes([CONSTANT, 3]), side=b"\4\0\x80\x3f\3\0\x40\0\x80\x3f\1\x80\x3f"), (4,)
        ),
    }  # fmt: skip
    for name, (payload, shape) in by_hand.items():
        frames[f"grid-{name}"] = assemble(payload, shape, 3, flags=SEGMENTED if "segmented" in name else 0)
    return frames


def levels_payload(
    values: tuple[float, ...] = (-1, 0, 1), bucket: int = 0, s: int = 3, table: int = 0, more: bytes = b"",
    symbols: bytes = b"\1\0",
) -> bytes:  # fmt: skip
    dtype = np.dtype("<f4") if table >> 2 == 0 else np.dtype("<f2")
    side = plain_varint(bucket) + bytes([s, table]) + more
    return side + np.array(values, dtype=dtype).tobytes() + symbols


def levels() -> dict[str, bytes]:
    specs = [
        "bingrad", "bingrad:form=pb,precision=fp16", "orq:levels=9,bucket=60,precision=fp32", "orq:levels=3,coder=raw",
        "qsgd:levels=33,bucket=70,norm=l2,precision=fp32", "qsgd:levels=5,coder=huffman", "terngrad:bucket=0",
        "signsgd:bucket=50", "linear:levels=255,bucket=0", "linear:levels=2,bucket=4,precision=fp16",
        "tinyscript:levels=8", "linear:levels=16,precision=fp32,coder=raw",
    ]  # fmt: skip
    dtypes = ["bingrad", "orq:levels=9,bucket=60,precision=fp32", "signsgd:bucket=50", "qsgd:levels=5,coder=huffman"]
    frames = of_specs(LEVELS, specs, dtypes, numbers(130))
    frames["orq-zeros"] = gradwire.codec("orq").encode(torch.zeros(2, 60))
    frames["orq-rest-of-one"] = gradwire.codec("orq:levels=5,bucket=20").encode(numbers(61))  # two numbers there
    parts = torch.cat([numbers(50), 100 * numbers(30, 1), torch.zeros(20)])
    for spec in ("orq:levels=5", "qsgd:bucket=18", "bingrad"):
        for dtype in FLOATS if spec == "bingrad" else FLOATS[:1]:
            frame = encode_into(gradwire.codec(spec), parts.to(dtype), segments=[50, 30, 20])
            assert plain_decode(frame).flags == SEGMENTED
            frames[f"{slug(spec)}-segmented-{name_of(dtype)}"] = frame
    frames["levels-one-segment"] = assemble(levels_payload(more=b"\1\5"), (5,), 4, flags=SEGMENTED)
    frames["levels-equal"] = assemble(levels_payload((2, 2, 2)), (5,), 4)
    frames["levels-largest-to-fp16"] = assemble(levels_payload((-(2.0**126), 0, 2.0**126)), (5,), 4, torch.float16)
    thirds = levels_payload((1,), s=4, table=2, symbols=bytes([RAW, 0b11100100]))  # ±1 and ±⅓, rounded
    frames["levels-thirds"] = assemble(thirds, (4,), 4)
    frames["levels-255-raw"] = assemble(
        levels_payload((0, 254), s=255, table=1, symbols=bytes([RAW, 0, 1, 127, 254])), (2, 2), 4
    )
    return frames


def brain_floats(values: tuple[float, ...]) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def sparse() -> dict[str, bytes]:
    ways = ("golomb", "rans")
    values = ("fp32", "fp16", "bf16", "fp4", "fp8", "e3m2b3")
    specs = [f"{name},positions={way}" for name in ("sbc:p=0.1", "stc:p=0.1") for way in ways]
    specs += [f"topk:p=0.2,values={v},positions={way}" for v in values for way in ways[: 1 + (v in ("bf16", "fp4"))]]
    dtypes = [s for s in specs if "golomb" in s and ("sbc" in s or "stc" in s or "fp32" in s or "fp4" in s)]
    frames = of_specs(SPARSE, specs, dtypes, numbers(150))
    m22 = ["m22:p=0.5", "m22:p=0.3,bits=1,m=0", "m22:p=0.5,bits=4,m=1", "m22:p=0.1,bits=6"]
    frames |= of_specs(SPARSE, m22, m22[:1], numbers(150))
    frames["m22-one-level"] = gradwire.codec("m22:k=30").encode(numbers(150).sign() * 0.25)
    clustered = torch.zeros(10, 100)
    clustered[::3, :6] = numbers(24).reshape(4, 6)
    frames["topk-clustered"] = gradwire.codec("topk:k=24").encode(clustered)
    frames["sparse-zeros"] = gradwire.codec("stc").encode(torch.zeros(1000))
    frames["sparse-scalar"] = gradwire.codec("sbc").encode(torch.tensor(-1.5))
    frames["sparse-all-golomb"] = gradwire.codec("stc:k=40,positions=golomb").encode(numbers(40))
    frames["sparse-all-classes"] = gradwire.codec("stc:k=40,positions=rans").encode(numbers(40))
    frames["sparse-one-symbol-raw"] = assemble(bytes([3, 0x10, 0, 2, RAW, 0]) + ONE, (3,), 5)  # one bit each
    frames["sparse-saturated"] = gradwire.codec("topk:k=2,values=fp16").encode(torch.tensor([1e38, 1.0, -1e38] * 4))
    frames["sparse-saturated-fp16"] = assemble(bytes([1, 0, 0, 1]) + struct.pack("<f", -1e38), (9,), 5, torch.float16)
    for name, (table, symbols) in {
        "raw": ((0.0, 1.0, 1.0, 3.0), bytes([RAW]) + packed("000 100 010 110 001 101 011 111")),
        "huffman": ((1.0, 2.0), bytes([HUFFMAN | 2 << 2 | 8 << 4]) + plain_gammas([32, 64, 32]) + b"\x1b\xc0"),
        "constant-127": ((0.0,) * 126 + (2.0,), bytes([CONSTANT, 253])),
        "zeros": ((0.0,), bytes([RAW, 0b01010101])),
    }.items():
        payload = bytes([8, 6, 0, 255, len(table)]) + brain_floats(table) + symbols
        frames[f"magnitudes-{name}"] = assemble(payload, (9,), 5, torch.float64 if name == "zeros" else torch.float32)
    largest = bytes([1, 6, 0, 1, 1]) + brain_floats((1e38,)) + bytes([CONSTANT, 0])
    frames["magnitudes-saturated-fp16"] = assemble(largest, (9,), 5, torch.float16)
    for m in range(3):
        classes = bytes([CONSTANT, 3 * 2**m])  # which leaves two bits open
        payload = bytes([3, 0x10, m, len(classes)]) + classes + packed("10 01 11") + ONE
        frames[f"sparse-classes-{m}"] = assemble(payload, (100,), 5)
    return frames


def sketch() -> dict[str, bytes]:
    frames, tensor = {}, numbers(60)
    for rows in (1, 3, 5, 7):
        for precision in ("fp32", "fp16"):
            spec = f"countsketch:ratio=2,rows={rows},p=0.3,precision={precision}"
            for dtype in FLOATS if rows == 3 else FLOATS[:1]:
                frames[f"sketch-{rows}-{precision}-{name_of(dtype)}"] = gradwire.codec(spec).encode(tensor.to(dtype))
    frames["sketch-seed-wraps"] = gradwire.codec("countsketch:rows=7,p=1").encode(tensor, seed=2**64 - 3)
    frames["sketch-zeros"] = gradwire.codec("countsketch").encode(torch.zeros(4, 10))
    frames["sketch-ties"] = assemble(sketch_payload(columns=1, kept=7, cells=(2,)), (20,), 6)
    frames["sketch-negative-zero"] = assemble(sketch_payload(kept=20, cells=(-0.0, 0)), (20,), 6)
    frames["sketch-saturated"] = assemble(sketch_payload(cells=(1e38, -2e38), kept=15), (20,), 6, torch.float16)
    return frames


def sketch_payload(
    table: int = 1, columns: int = 2, kept: int = 1, scale: float = 1.0, cells: tuple[float, ...] = (1, 2)
) -> bytes:
    side = bytes([table]) + plain_varint(columns) + plain_varint(kept) + struct.pack("<fQ", scale, 7)
    return side + struct.pack(f"<{len(cells)}f", *cells)


# ── damaged ───────────────────────────────────────────────────────────────────────────────────────


def damaged() -> Damaged:
    return {**damaged_grid(), **damaged_levels(), **damaged_sparse(), **damaged_sketch()}


def damaged_grid() -> Damaged:
    zeros = bytes([CONSTANT, 2])

    def frame(payload: bytes, shape: tuple[int, ...] = (5,), flags: int = 0) -> bytes:
        return assemble(payload, shape, 3, flags=flags)

    def outliers(data: bytes) -> bytes:
        return frame(grid_payload(zeros, outliers=data))

    good = grid_payload(zeros)
    return {
        "grid-int32": (assemble(good, (5,), 3, torch.int32), "always stored"),
        "grid-of-nothing": (frame(good, (0,)), "always stored"),
        "grid-empty": (frame(b""), "cut short"),
        "grid-m-0": (frame(grid_payload(zeros, 0)), "invalid grid"),
        "grid-m-128": (frame(grid_payload(zeros, 128)), "invalid grid"),
        "grid-16-offsets": (frame(grid_payload(zeros, 2, bytes(16))), "invalid grid"),
        "grid-offsets-cut": (frame(bytes([2, 9, 0, 0])), "cut short"),
        "grid-step-0": (frame(grid_payload(zeros, side=bytes(2))), "invalid step"),
        "grid-segments": (frame(grid_payload(zeros, side=b"\1\4" + STEP_1), flags=SEGMENTED), "do not add up"),
        "grid-outliers-longer-than-the-rest": (frame(good[:4] + bytes([4]) + zeros), "cut short"),
        "grid-outliers-longer-than-all": (frame(good[:4] + bytes([99]) + zeros), "too large"),
        "grid-gennorm": (frame(grid_payload(bytes([RANS | 1 << 2 | 8 << 4, 0, 0, 0]))), "invalid model"),
        "grid-symbol-beyond": (frame(grid_payload(bytes([CONSTANT, 5]))), "invalid constant"),
        "outliers-0": (outliers(bytes([0, 0, 0, 0])), "invalid outliers"),
        "outliers-more-than-entries": (outliers(bytes([6, 0, 0]) + bytes([255] * 9)), "too large"),
        "outliers-a-49": (outliers(bytes([1, 49, 0]) + bytes([255] * 9)), "invalid outliers"),
        "outliers-b-25": (outliers(bytes([1, 0, 25]) + bytes([255] * 9)), "invalid outliers"),
        "outliers-without-codes": (outliers(bytes([1, 0, 0])), "invalid outliers"),
        "outliers-cut": (outliers(bytes([2, 0, 0]) + packed("1 0 1 00000")), "damaged outliers"),
        "outliers-position-beyond": (outliers(bytes([1, 0, 0]) + packed("000001 0 1")), "damaged outliers"),
        "outliers-magnitude-beyond": (
            outliers(bytes([1, 0, 0]) + packed("1 0" + "0" * 24 + "1" + "0" * 24)), "damaged outliers"
        ),
        "outliers-excess-of-26-bits": (outliers(bytes([1, 0, 0, 1, 0, 0, 16, 0, 0, 0, 0])), "damaged outliers"),
        "outliers-padding": (outliers(bytes([1, 0, 0]) + packed("1 0 1 1")), "damaged outliers"),
        "outliers-byte-more": (outliers(bytes([1, 0, 0]) + packed("1 0 1") + b"\0"), "damaged outliers"),
    }  # fmt: skip


def damaged_levels() -> Damaged:
    make = levels_payload

    def frame(payload: bytes, shape: tuple[int, ...] = (20,), flags: int = 0) -> bytes:
        return assemble(payload, shape, 4, flags=flags)

    return {
        "levels-int32": (assemble(make(), (20,), 4, torch.int32), "always stored"),
        "levels-of-nothing": (frame(make(), (0,)), "always stored"),
        "levels-empty": (frame(b""), "cut short"),
        "levels-1": (frame(make(s=1)), "invalid table of levels"),
        "levels-kind-3": (frame(make(table=3)), "invalid table of levels"),
        "levels-precision-3": (frame(make(table=12)), "invalid table of levels"),
        "levels-table-bit-4": (frame(make(table=16)), "invalid table of levels"),
        "levels-segments-0": (frame(make(more=b"\0"), flags=SEGMENTED), "segments do not add up"),
        "levels-segments-too-few": (frame(make(more=b"\1\x07"), flags=SEGMENTED), "segments do not add up"),
        "levels-segment-small": (frame(make((-1, 0, 1) * 2, more=b"\2\5\x0f"), flags=SEGMENTED), "are too small"),
        "levels-bucket-small": (frame(make(bucket=5)), "invalid size of buckets"),
        "levels-bucket-whole": (frame(make(bucket=20)), "invalid size of buckets"),
        "levels-bucket-beyond": (frame(make(bucket=21)), "too large"),
        "levels-numbers-cut": (frame(make((-1, 0), symbols=b"")), "cut short"),
        "levels-nan": (frame(make((-1, 0, math.nan))), "invalid level"),
        "levels-inf": (frame(make((-1, 0, math.inf))), "invalid level"),
        "levels-2^127": (frame(make((-1, 0, 2.0**127))), "invalid level"),
        "levels-minus-0": (frame(make((-1, -0.0, 1))), "invalid level"),
        "levels-descending": (frame(make((0, 1, -1))), "not in ascending order"),
        "levels-even-descending": (frame(make((1, 0), table=1)), "not in ascending order"),
        "levels-negative-magnitude": (frame(make((-1,), table=2)), "negative level"),
        "levels-symbol-beyond": (frame(make(symbols=b"\1\3")), "invalid constant"),
        "levels-byte-more": (frame(make() + b"\0"), "invalid constant"),
        "levels-gennorm": (frame(make(symbols=bytes([RANS | 1 << 2 | 8 << 4, 0, 0, 0]))), "invalid model"),
    }


def damaged_sparse() -> Damaged:
    def frame(*parts: bytes | list[int]) -> bytes:
        return assemble(b"".join(map(bytes, parts)), (1000,), 5)

    good = bytes([1, 0, 0, 1]) + ONE
    pack = struct.Struct("<f").pack
    return {
        "sparse-int32": (assemble(good, (1000,), 5, torch.int32), "always stored"),
        "sparse-of-nothing": (assemble(good, (0,), 5), "always stored"),
        "sparse-segmented": (assemble(good, (1000,), 5, flags=SEGMENTED), "has no segments"),
        "sparse-empty": (frame(), "cut short"),
        "sparse-more-than-there-are": (frame(plain_varint(1001), [0, 0], [255] * 200, ONE), "too large"),
        "sparse-nothing-and-more": (frame([0, 0]), "has no more to say"),
        "sparse-values-6": (frame([1, 6, 0, 1], ONE), "invalid number of magnitudes"),  # once an unknown kind
        "sparse-values-7": (frame([1, 7, 0, 1], ONE), "damaged values"),
        **{
            f"magnitudes-{name}": (frame([1, 6, 0, 1, h], brain_floats(table), symbols), message)
            for name, (h, table, symbols, message) in {
                "0": (0, (), [CONSTANT, 0], "invalid number of magnitudes"),
                "128": (128, (1.0,) * 128, [CONSTANT, 0], "invalid number of magnitudes"),
                "cut": (2, (1.0,), [], "cut short"),
                "without-symbols": (2, (1.0, 2.0), [], "cut short"),
                "inf": (2, (1.0, math.inf), [CONSTANT, 0], "magnitudes are not"),
                "nan": (2, (math.nan, 1.0), [CONSTANT, 0], "magnitudes are not"),
                "negative": (2, (-1.0, 1.0), [CONSTANT, 0], "magnitudes are not"),
                "minus-0": (2, (-0.0, 1.0), [CONSTANT, 0], "magnitudes are not"),
                "descending": (2, (2.0, 1.0), [CONSTANT, 0], "magnitudes are not"),
                "symbol-beyond": (1, (1.0,), [CONSTANT, 2], "invalid constant"),
                "byte-more": (1, (1.0,), [CONSTANT, 1, 0], "invalid constant"),
                "gennorm": (1, (1.0,), [RANS | 1 << 2 | 8 << 4, 0, 0, 0], "invalid model"),
            }.items()
        },
        "sparse-values-cut": (frame([1, 2, 0, 1], ONE[:3]), "damaged values"),
        "sparse-values-byte-more": (frame([1, 4, 0, 1, 0, 0, 0]), "damaged values"),
        "sparse-fp32-nan": (frame([1, 2, 0, 1], pack(math.nan)), "not finite"),
        "sparse-fp16-inf": (frame([1, 3, 0, 1, 0, 0x7C]), "not finite"),
        "sparse-value-0": (frame([1, 0, 0, 1], bytes(4)), "damaged value"),
        "sparse-value-inf": (frame([1, 0, 0, 1], pack(-math.inf)), "damaged value"),
        "sparse-magnitude-negative": (frame([1, 1, 0, 1], pack(-1.0), [0]), "damaged value"),
        "sparse-value-byte-more": (frame(good, [0]), "trailing bytes"),
        "sparse-signs-missing": (frame([1, 1, 0, 1], ONE), "wrong length of packed symbols"),
        "sparse-signs-padding": (frame([1, 1, 0, 1], ONE, [2]), "damaged packed symbols"),
        "sparse-minifloat-cut": (frame([1, 5, 0, 1, 0]), "cut short"),
        "sparse-positions-2": (frame([1, 0x20, 0, 1], ONE), "unknown code of positions 2"),
        "golomb-48": (frame([1, 0, 48, 1], bytes(6), ONE), "invalid parameter of a Golomb code"),
        "golomb-cut": (frame([1, 0, 0]), "position"),
        "golomb-beyond": (frame([1, 0, 9], packed("01 111111111"), ONE), "position"),
        "golomb-quotient-beyond": (frame([1, 0, 47, 0x80], bytes(6), ONE), "position"),
        "golomb-without-a-one": (frame([1, 0, 0], bytes(100)), "position"),
        "golomb-padding": (frame([1, 0, 0, 0b11], ONE), "position"),
        "classes-3": (frame([1, 0x10, 3, 2, 1, 0], ONE), "invalid classes of gaps"),
        "classes-cut": (frame([1, 0x10, 0, 9, 1, 0], ONE), "cut short"),
        "classes-gennorm": (frame([1, 0x10, 0, 4, RANS | 1 << 2 | 8 << 4, 0, 0, 0], ONE), "invalid model"),
        "classes-beyond": (frame([1, 0x10, 0, 2, 1, 11], ONE), "invalid constant"),
        "classes-gap-beyond": (frame([1, 0x10, 0, 2, 1, 10, 255, 255], ONE), "position"),
        "classes-low-bits-cut": (frame([1, 0x10, 0, 2, 1, 10, 0]), "cut short"),
        "classes-padding": (frame([1, 0x10, 0, 2, 1, 2, 2], ONE), "position"),
        "classes-sum-beyond": (frame([3, 0x10, 0, 2, 1, 9, 255, 255, 255], ONE), "position"),
    }


def damaged_sketch() -> Damaged:
    make = sketch_payload

    def frame(payload: bytes, flags: int = 0) -> bytes:
        return assemble(payload, (20,), 6, flags=flags)

    wrong = {
        "0-rows": make(table=0), "2-rows": make(table=2), "9-rows": make(table=9), "bf16": make(table=0x21),
        "table-bit-6": make(table=0x41), "0-columns": make(columns=0, cells=()), "none-kept": make(kept=0),
        "scale-negative": make(scale=-1), "scale-2": make(scale=2), "scale-minus-0": make(scale=-0.0),
        "scale-nan": make(scale=math.nan), "cell-inf": make(cells=(1, math.inf)), "cell-missing": make(cells=(1,)),
        "cell-more": make(cells=(1, 2, 3)), "byte-more": make() + b"\0",
    }  # fmt: skip
    frames = {f"sketch-{name}": (frame(payload), "invalid sketch") for name, payload in wrong.items()}
    return frames | {
        "sketch-int32": (assemble(make(), (20,), 6, torch.int32), "always stored"),
        "sketch-of-nothing": (assemble(make(), (0,), 6), "always stored"),
        "sketch-segmented": (frame(make(), SEGMENTED), "has no segments"),
        "sketch-empty": (frame(b""), "cut short"),
        "sketch-cut": (frame(make()[:10]), "cut short"),
        "sketch-columns-beyond": (frame(make(columns=21)), "too large"),
        "sketch-kept-beyond": (frame(make(kept=21)), "too large"),
    }
