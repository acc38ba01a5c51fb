"""Write the golden frames under tests/golden: valid ones with the values they stand for, and damaged ones with the
error that they must raise. They hold the code to docs/wire-format.md: tests read them and never re-create them.

    python scripts/make_golden.py                    say what would be written
    python scripts/make_golden.py --write            write what is not there yet
    python scripts/make_golden.py --write --force    replace what is there: only with a new version of the wire format

The values come from the plain decoder in tests/support/plain_decoder.py, not from gradwire's; both must agree here.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests/golden"
sys.path.insert(0, str(ROOT / "tests"))

import golden_families  # noqa: E402
import golden_homomorphic  # noqa: E402
import golden_structured  # noqa: E402
import gradwire  # noqa: E402
from golden_families import name_of, numbers  # noqa: E402
from support import helpers, plain_coders  # noqa: E402
from support.helpers import DTYPES, FLOATS, assemble, bits, encode_into, repair  # noqa: E402
from support.plain_coders import plain_varint  # noqa: E402
from support.plain_decoder import plain_decode  # noqa: E402

RAW, CONSTANT, HUFFMAN, RANS = 0, 1, 2, 3
GENNORM, HISTOGRAM = 1, 2
CODERS = {"raw": RAW, "huffman": HUFFMAN, "rans": RANS}
MODELS = {"gennorm": GENNORM, "histogram": HISTOGRAM}
NONFINITE, SEGMENTED = 1, 2
FP4, STEP_1 = bytes([0]), bytes([0x80, 0x3F])
COUNTS = [1, 3, 9, 20, 50, 100, 50, 20, 9, 3, 1]  # of fp4's symbols


# ── valid ─────────────────────────────────────────────────────────────────────────────────────────


def valid() -> dict[str, bytes]:
    own = {**stored(), **casts(), **minifloats(), **segmented(), **layouts()}
    return {**own, **golden_families.valid(), **golden_homomorphic.valid(), **golden_structured.valid()}


def stored() -> dict[str, bytes]:
    none, frames = gradwire.codec("none"), {}
    for dtype in DTYPES:
        tensor = (numbers(12) * 1e4).to(dtype).reshape(3, 4)
        frames[f"stored-{name_of(dtype)}"] = none.encode(tensor)
    frames["stored-scalar"] = none.encode(torch.tensor(-1.5))
    frames["stored-empty"] = none.encode(torch.empty(3, 0, 5))
    frames["stored-rank-15"] = none.encode(torch.tensor([7.0, 8.0]).reshape((1,) * 14 + (2,)))
    for dtype in FLOATS:
        tensor = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), -0.0], dtype=dtype)
        frames[f"stored-nonfinite-{name_of(dtype)}"] = gradwire.codec("co3").encode(tensor)
    return frames


def casts() -> dict[str, bytes]:
    frames = {}
    for spec in ("fp16", "bf16"):
        for dtype in FLOATS:
            frames[f"cast-{spec}-{name_of(dtype)}"] = gradwire.codec(spec).encode(numbers(15).to(dtype))
        frames[f"cast-{spec}-saturated"] = gradwire.codec(spec).encode(torch.tensor([3.4e38, -3.4e38, 1e-45, 65520]))
    return frames


def minifloats() -> dict[str, bytes]:
    frames = {}
    for dtype in FLOATS:
        for coder, number in CODERS.items():
            for model in MODELS if number != RAW else ("gennorm",):
                spec = f"co3:coder={coder},model={model}"
                frame = gradwire.codec(spec).encode(numbers(150).to(dtype))
                found = plain_decode(frame)
                assert (found.coder, found.model) == (number, MODELS[model] if number != RAW else 0), spec
                kind = coder if number == RAW else f"{coder}-{model}"
                frames[f"fp4-{kind}-{name_of(dtype)}"] = frame
        frames[f"fp4-constant-{name_of(dtype)}"] = gradwire.codec("co3").encode(torch.zeros(40, dtype=dtype))
    formats = ["fp8", "e2m1", "e4m3", "e4m3b10", "e3m0b2", "e2m2b1f", "e3m2b3n", "ue3m2b5", "ue1m3b0f", "e6m1b31"]
    for fmt in formats:
        for coder, number in CODERS.items():
            sparse = numbers(200).where(torch.arange(200) % 3 == 0, torch.zeros(200))
            frame = gradwire.codec(f"co3:format={fmt},coder={coder}").encode(sparse)
            assert plain_decode(frame).coder == number, f"{fmt} {coder}"
            frames[f"{fmt}-{coder}"] = frame
    frames["fp4-stochastic"] = gradwire.codec("co3:rounding=stochastic").encode(numbers(90), seed=12345)
    frames["fp4-smallest-step"] = gradwire.codec("co3").encode(numbers(40) * 1e-38)
    frames["fp4-largest-step"] = gradwire.codec("co3").encode(numbers(40).sign() * 3e38)
    return frames


def segmented() -> dict[str, bytes]:
    frames, tensor = {}, torch.cat([numbers(30), 100 * numbers(20, 1), torch.zeros(10), numbers(1, 2)])
    sides = b"".join(bytes([n]) + STEP_1 for n in (0, 3, 0, 1))
    frames["segmented-empty"] = assemble(FP4 + bytes([4]) + sides + bytes([RAW, 0x94, 0x26]), (4,), 1, flags=SEGMENTED)
    for spec in ("co3", "co3:coder=huffman", "co3:coder=raw", "gennorm", "co3:format=e2m2b1f"):
        for dtype in FLOATS if spec == "co3" else FLOATS[:1]:
            frame = encode_into(gradwire.codec(spec), tensor.to(dtype), segments=[30, 20, 10, 1])
            frames[f"segmented-{spec.replace(':', '-').replace('=', '-')}-{name_of(dtype)}"] = frame
    return frames


def layouts() -> dict[str, bytes]:
    """More lanes and chunks than an encoder would choose for so few entries."""
    frames = {}
    for lane_bits in range(7):
        frames[f"rans-{1 << lane_bits}-lanes"] = rans_frame(8 + lane_bits, lane_bits, count=150)
    for chunks, count in ((2, 65), (2, 128), (3, 140), (5, 300)):
        frames[f"rans-{chunks}-chunks-{count}"] = rans_frame(12, 2, count, chunks)
    frames["e5m2"] = assemble(bytes([4]) + STEP_1 + bytes([RAW, 0, 100, 200, 246]), (4,), 1)
    return frames


def rans_frame(precision: int, lane_bits: int, count: int, chunks: int = 1) -> bytes:
    f = plain_coders.plain_normalize(COUNTS, precision)
    symbols = symbols_of(f, count)
    size = -(-count // (64 * chunks)) * 64
    assert -(-count // size) == chunks
    coded = [
        plain_coders.plain_rans_encode(symbols[i : i + size], f, precision, 1 << lane_bits)
        for i in range(0, count, size)
    ]
    return assemble(FP4 + STEP_1 + rans_head(f, precision) + rans_body(lane_bits, coded), (count,), 1)


def symbols_of(f: list[int], count: int) -> list[int]:
    slots = [s for s in range(len(f)) for _ in range(f[s])]
    return [slots[i * 2654435761 % 2**32 * len(slots) >> 32] for i in range(1, count + 1)]


def rans_head(f: list[int], precision: int, coder: int = RANS) -> bytes:
    return bytes([coder | HISTOGRAM << 2 | precision << 4]) + plain_coders.plain_gammas(f[:5] + f[6:])


def rans_body(lane_bits: int, coded: list[bytes]) -> bytes:
    if len(coded) == 1:
        return bytes([lane_bits]) + coded[0]
    lengths = b"".join(struct.pack("<I", len(c)) for c in coded[:-1])
    return bytes([lane_bits | 128]) + plain_varint(len(coded)) + lengths + b"".join(coded)


# ── damaged ───────────────────────────────────────────────────────────────────────────────────────


def damaged() -> dict[str, tuple[bytes, str]]:
    families = golden_families.damaged() | golden_homomorphic.damaged() | golden_structured.damaged()
    return {**damaged_headers(), **damaged_payloads(), **damaged_symbols(), **damaged_rans(), **families}


def damaged_headers() -> dict[str, tuple[bytes, str]]:
    good = gradwire.codec("co3").encode(numbers(40))
    none = gradwire.codec("none").encode(numbers(3))

    def edited(at: int, value: int) -> bytes:
        return repair(good[:at] + bytes([value]) + good[at + 1 :])

    return {
        "empty": (b"", "frame is cut short"),
        "cut-in-header": (good[:9], "frame is cut short"),
        "cut-in-payload": (good[:-1], "but there are"),
        "one-byte-more": (good + b"\0", "but there are"),
        "magic": (edited(0, ord("g")), "wrong magic"),
        "version-0": (edited(2, 0), "frame has version 0"),
        "version-2": (edited(2, 2), "frame has version 2; this gradwire reads version 1: upgrade it"),
        "codec-9": (edited(3, 9), "unknown codec 9"),
        "codec-15": (edited(3, 15), "unknown codec 15"),
        "flag-6": (edited(3, 1 | 1 << 6), "unknown flags"),
        "flag-7": (edited(3, 1 | 1 << 7), "unknown flags"),
        "stored-segmented": (assemble(none[11:], (3,), 0, flags=SEGMENTED), "a frame of this codec has no segments"),
        "dtype-10": (edited(4, 10 | 1 << 4), "unknown dtype 10"),
        "checksum": (good[:5] + bytes([good[5] ^ 1]) + good[6:], "checksum mismatch"),
        "length-not-shortest": (repair(none[:9] + bytes([12 | 128, 0]) + none[10:]), "shortest form"),
        "length-without-end": (repair(good[:9] + bytes([255] * 12)), "too long"),
        "dimension-too-large": (assemble(b"", (2**49,), 0), "too large"),
        "elements-too-many": (assemble(b"", (2**30, 2**30), 0), "2^48 elements or more"),
        "elements-beyond-the-limit": (assemble(FP4 + STEP_1 + bytes([CONSTANT, 5]), (2**40,), 1), "max_elements"),
    }


def damaged_payloads() -> dict[str, tuple[bytes, str]]:
    def minifloat(payload: bytes, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4,)) -> bytes:
        return assemble(payload, shape, 1, dtype)

    def segmented_(rest: bytes) -> bytes:
        return assemble(FP4 + rest, (4,), 1, flags=SEGMENTED)

    raw = bytes([RAW, 0x55, 0x55])
    step = struct.Struct("<f")
    segment = bytes([3]) + STEP_1
    return {
        "stored-short": (assemble(bytes(11), (3,), 0), "wrong length of a stored tensor"),
        "stored-long": (assemble(bytes(13), (3,), 0), "wrong length of a stored tensor"),
        "stored-bool-2": (assemble(bytes([0, 1, 2]), (3,), 0, torch.bool), "damaged bool tensor"),
        "cast-empty": (assemble(b"", (3,), 2), "damaged cast frame"),
        "cast-to-fp32": (assemble(bytes([0]) + bytes(6), (3,), 2), "damaged cast frame"),
        "cast-to-200": (assemble(bytes([200]) + bytes(6), (3,), 2), "damaged cast frame"),
        "cast-of-nothing": (assemble(bytes([1]), (0,), 2), "damaged cast frame"),
        "cast-int16": (assemble(bytes([1]) + bytes(6), (3,), 2, torch.int16), "damaged cast frame"),
        "cast-short": (assemble(bytes([1]) + bytes(5), (3,), 2), "damaged cast frame"),
        "minifloat-int32": (minifloat(FP4 + STEP_1 + raw, torch.int32), "always stored"),
        "minifloat-of-nothing": (minifloat(FP4 + STEP_1 + raw, shape=(0,)), "always stored"),
        "minifloat-empty": (minifloat(b""), "frame is cut short"),
        "format-6": (minifloat(bytes([6]) + STEP_1 + raw), "unknown float format 6"),
        "format-special-3": (minifloat(bytes([255, 1 | 3 << 1, 2, 1, 1]) + STEP_1 + raw), "invalid float format"),
        "format-e0": (minifloat(bytes([255, 3, 0, 1, 1]) + STEP_1 + raw), "invalid float format"),
        "format-nine-bits": (minifloat(bytes([255, 3, 5, 3, 1]) + STEP_1 + raw), "invalid float format"),
        "format-256-symbols": (minifloat(bytes([255, 0, 6, 2, 1]) + STEP_1 + raw), "invalid float format"),
        "format-cut": (minifloat(bytes([255, 3, 2])), "frame is cut short"),
        "step-0": (minifloat(FP4 + bytes(2) + raw), "invalid step"),
        "step-negative": (minifloat(FP4 + step.pack(-1.0)[2:] + raw), "invalid step"),
        "step-subnormal": (minifloat(FP4 + bytes([1, 0]) + raw), "invalid step"),
        "step-2^127": (minifloat(FP4 + step.pack(2.0**127)[2:] + raw), "invalid step"),
        "step-inf": (minifloat(FP4 + bytes([0x80, 0x7F]) + raw), "invalid step"),
        "step-nan": (minifloat(FP4 + bytes([0xC0, 0x7F]) + raw), "invalid step"),
        "segments-too-few": (segmented_(bytes([1]) + segment + raw), "do not add up"),
        "segments-too-many": (segmented_(bytes([2]) + 2 * segment + raw), "do not add up"),
        "segments-cut": (segmented_(bytes([2]) + segment), "cut short"),
        "segments-huge": (segmented_(plain_varint(2**40) + segment), "too large"),
    }


def damaged_symbols() -> dict[str, tuple[bytes, str]]:
    f = [0, 0, 0, 0, 64, 128, 64, 0, 0, 0, 0]  # codes of fp4's middle: 10, 0, 11
    table = rans_head(f, 8, HUFFMAN)

    def fp4(symbols: bytes, shape: tuple[int, ...] = (4,)) -> bytes:
        return assemble(FP4 + STEP_1 + symbols, shape, 1)

    def custom(symbols: bytes, kind: int) -> bytes:
        return assemble(bytes([255, kind, 2, 2, 1]) + STEP_1 + symbols, (4,), 1)

    gennorm = bytes([RANS | GENNORM << 2 | 8 << 4])
    return {
        "coding-raw-with-model": (fp4(bytes([RAW | GENNORM << 2, 0, 0])), "invalid coding byte"),
        "coding-constant-with-precision": (fp4(bytes([CONSTANT | 8 << 4, 5])), "invalid coding byte"),
        "precision-7": (fp4(bytes([RANS | GENNORM << 2 | 7 << 4, 0, 0])), "invalid precision 7"),
        "precision-15": (fp4(bytes([HUFFMAN | GENNORM << 2 | 15 << 4, 0, 0])), "invalid precision 15"),
        "model-none": (fp4(bytes([RANS | 8 << 4, 0, 0])), "invalid model"),
        "model-3": (fp4(bytes([RANS | 3 << 2 | 8 << 4, 0, 0])), "invalid model"),
        "gennorm-of-a-custom-format": (custom(gennorm + bytes(9), 3), "invalid model"),
        "gennorm-of-an-unsigned-format": (custom(gennorm + bytes(9), 2), "invalid model"),
        "beta-128": (fp4(gennorm + bytes([128, 0]) + bytes(9)), "invalid β index"),
        "gennorm-cut": (fp4(gennorm + bytes([3])), "cut short"),
        "table-cut": (fp4(table[:2]), "damaged frequency table"),
        "table-sum": (fp4(rans_head([200] + [9] * 10, 8)), "damaged frequency table"),
        "table-padding": (fp4(table[:-1] + bytes([table[-1] | 128])), "damaged frequency table"),
        "table-zeros": (fp4(table[:1] + bytes(60)), "damaged frequency table"),
        "constant-11": (fp4(bytes([CONSTANT, 11])), "invalid constant"),
        "constant-missing": (fp4(bytes([CONSTANT])), "cut short"),
        "constant-and-more": (fp4(bytes([CONSTANT, 5, 0])), "invalid constant"),
        "raw-short": (fp4(bytes([RAW, 0x55])), "wrong length of packed symbols"),
        "raw-long": (fp4(bytes([RAW, 0x55, 0x55, 0])), "wrong length of packed symbols"),
        "raw-symbol-11": (fp4(bytes([RAW, 0x5B, 0x55])), "damaged packed symbols"),
        "raw-padding": (fp4(bytes([RAW, 0x55, 0x15]), (3,)), "damaged packed symbols"),
        "huffman-one-symbol": (fp4(rans_head([0] * 5 + [256] + [0] * 5, 8, HUFFMAN) + b"\0"), "invalid huffman table"),
        "huffman-empty": (fp4(table), "damaged huffman data"),
        "huffman-cut": (fp4(table + bytes([0xFF]), (5,)), "damaged huffman data"),
        "huffman-long": (fp4(table + bytes([0, 0])), "damaged huffman data"),
        "huffman-padding": (fp4(table + bytes([0b00000001])), "damaged huffman data"),
    }


def damaged_rans() -> dict[str, tuple[bytes, str]]:
    f = plain_coders.plain_normalize(COUNTS, 12)
    symbols = symbols_of(f, 140)
    coded = [plain_coders.plain_rans_encode(symbols[i : i + 64], f, 12, 4) for i in range(0, 140, 64)]
    one = plain_coders.plain_rans_encode(symbols, f, 12, 4)

    def frame(body: bytes, count: int = 140) -> tuple[bytes, str]:
        return assemble(FP4 + STEP_1 + rans_head(f, 12) + body, (count,), 1), "rans"

    def with_states(first: int) -> bytes:
        return bytes([2]) + first.to_bytes(3, "little") + one[3:]

    changed = bytearray(one)
    changed[20] ^= 4
    several = rans_body(2, coded)
    return {
        "rans-empty": (frame(b"")[0], "cut short"),
        "rans-128-lanes": frame(bytes([7]) + one),
        "rans-0-chunks": frame(bytes([2 | 128, 0]) + one),
        "rans-1-chunk": frame(bytes([2 | 128, 1]) + one),
        "rans-last-chunk-empty": frame(bytes([2 | 128, 3]) + several[2:], count=128),
        "rans-more-chunks-than-entries": (frame(bytes([2 | 128, 200, 1]) + several[2:])[0], "too large"),
        "rans-lengths-cut": (frame(several[:6])[0], "cut short"),
        "rans-lengths-too-large": frame(several[:2] + b"\xff\xff\xff\xff" + several[6:]),
        "rans-lengths-off-by-one": frame(several[:2] + struct.pack("<I", len(coded[0]) + 1) + several[6:]),
        "rans-states-cut": frame(bytes([2]) + one[:11]),
        "rans-state-below": frame(with_states(2**14 - 1)),
        "rans-state-above": frame(with_states(2**22)),
        "rans-cut": frame(bytes([2]) + one[:-1]),
        "rans-long": frame(bytes([2]) + one + b"\0"),
        "rans-byte-changed": frame(bytes([2]) + bytes(changed)),
        "rans-one-entry-more": frame(bytes([2]) + one, count=141),
        "rans-one-entry-less": frame(bytes([2]) + one, count=139),
    }


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def build() -> dict[Path, bytes]:
    """All files and what is in them."""
    files, index = {}, {"valid": {}, "damaged": {}}
    for name, frame in valid().items():
        expected = plain_decode(frame).tensor
        helpers.check_same(gradwire.decode(frame), expected)
        files[FOLDER / "valid" / f"{name}.frame"] = frame
        index["valid"][name] = {
            "dtype": name_of(expected.dtype), "shape": list(expected.shape), "values": bits(expected).hex()
        }  # fmt: skip
    for name, (frame, message) in damaged().items():
        try:
            gradwire.decode(frame)
            raise AssertionError(f"{name} decodes")
        except gradwire.FrameError as error:
            assert message in str(error), f"{name}: {error}"
        files[FOLDER / "damaged" / f"{name}.frame"] = frame
        index["damaged"][name] = message
    files[FOLDER / "index.json"] = (json.dumps(index, indent=1, ensure_ascii=False) + "\n").encode()
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write files; otherwise only say which")
    parser.add_argument("--force", action="store_true", help="replace files that are there and differ")
    options = parser.parse_args()
    files = build()
    new = [path for path in files if not path.exists()]
    other = [path for path, data in files.items() if path.exists() and path.read_bytes() != data]
    print(f"{len(files)} files: {len(new)} new, {len(other)} that differ from what is there")
    if other and options.write and not options.force:
        print("not written: golden frames change only with the wire format's version (--force replaces them), e.g.")
        print("  " + str(other[0].relative_to(ROOT)))
        return 1
    if options.write:
        for path in new + other:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
    return 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    sys.exit(main())
