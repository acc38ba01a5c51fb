"""The frame: golden ones, damaged ones, hostile ones. docs/wire-format.md is the authority."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import FrameError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader, varint
from support.cases import for_each
from support.helpers import DTYPES, SPECS, assemble, bits, gradient, repair, use_backend
from support.plain_coders import plain_varint
from support.plain_decoder import plain_decode

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
INDEX = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))
LIMIT = 100_000  # elements that damaged frames may ask for here


def golden(kind: str, name: str) -> bytes:
    return (GOLDEN / kind / f"{name}.frame").read_bytes()


def check_fails(frame: bytes, message: str | None = None) -> None:
    with pytest.raises(FrameError, match=message):
        gradwire.decode(frame, max_elements=LIMIT)


def check_fails_or_decodes(frame: bytes) -> None:
    """What gets past the checksum may be a valid frame of other values; it is no reason for any other error."""
    try:
        decoded = gradwire.decode(frame, max_elements=LIMIT)
    except FrameError:
        return
    assert decoded.numel() <= LIMIT


# ── golden frames ─────────────────────────────────────────────────────────────────────────────────


def test_no_golden_frame_is_missing():
    for kind in ("valid", "damaged"):
        assert {path.stem for path in (GOLDEN / kind).glob("*.frame")} == set(INDEX[kind])
    assert len(INDEX["valid"]) > 80 and len(INDEX["damaged"]) > 70


@for_each("name", INDEX["valid"])
def test_golden_frames_decode_to_their_values(backend, name):
    decoded, expected = gradwire.decode(golden("valid", name)), INDEX["valid"][name]
    assert str(decoded.dtype) == f"torch.{expected['dtype']}"
    assert list(decoded.shape) == expected["shape"]
    assert bits(decoded).hex() == expected["values"]


@for_each("name", INDEX["valid"])
def test_golden_frames_are_what_the_page_says(name):
    assert bits(plain_decode(golden("valid", name)).tensor).hex() == INDEX["valid"][name]["values"]


def test_golden_frames_cover_what_there_is():
    found = [plain_decode(golden("valid", name)) for name in INDEX["valid"]]
    minifloats = [f for f in found if f.codec == 1]
    for dtype in DTYPES:
        assert any(f.codec == 0 and f.dtype is dtype for f in found)
    for dtype in DTYPES[:4]:
        assert {f.payload[0] for f in found if f.codec == 2 and f.dtype is dtype} == {1, 2}
        combinations = {(f.coder, f.model) for f in minifloats if f.dtype is dtype}
        assert combinations >= {(0, 0), (1, 0), (2, 1), (2, 2), (3, 1), (3, 2)}
        assert any(f.flags == 2 for f in minifloats if f.dtype is dtype)
    assert {f.payload[0] for f in minifloats} == {0, 1, 2, 3, 4, 5, 255}
    assert {f.precision for f in minifloats} == {0, *range(8, 15)}
    assert {f.lanes for f in minifloats} == {0, 1, 2, 4, 8, 16, 32, 64}
    assert {f.chunks for f in minifloats} >= {1, 2, 3, 5}


def test_golden_frames_cover_the_families():
    found = [plain_decode(golden("valid", name)) for name in INDEX["valid"]]
    grids, levels, sparse, sketches = ([f for f in found if f.codec == codec] for codec in (3, 4, 5, 6))
    for family in (grids, levels, sparse, sketches):
        assert {f.dtype for f in family} == set(DTYPES[:4])
    for family in (grids, levels):
        assert {f.coder for f in family} == {0, 1, 2, 3}
        assert {f.flags for f in family} == {0, 2}
    assert any(f.positions for f in grids if f.flags) and any(f.positions for f in grids if not f.flags)
    assert {f.payload[0] for f in grids} >= {1, 2, 127} and {f.payload[1] for f in grids} >= {0, 1, 15}
    assert {f.table & 3 for f in levels} == {0, 1, 2} and {f.table >> 2 for f in levels} == {0, 1, 2}
    assert {len(f.levels) for f in levels} >= {2, 3, 255} and any(len(f.buckets) > 2 for f in levels)
    assert any(f.kind is None for f in sparse)  # nothing is sent
    kinds = {f.kind for f in sparse if f.kind is not None}
    assert {kind & 15 for kind in kinds} == set(range(7)) and {kind >> 4 for kind in kinds} == {0, 1}
    assert any(len(f.positions) == f.count for f in sparse)
    assert {len(f.magnitudes) for f in sparse} >= {0, 1, 2, 8, 127}
    assert {(f.table & 15, f.table >> 4) for f in sketches} == {(r, p) for r in (1, 3, 5, 7) for p in (0, 1)}


@for_each("name", INDEX["damaged"])
def test_golden_damage(backend, name):
    with pytest.raises(FrameError) as caught:
        gradwire.decode(golden("damaged", name))
    message = INDEX["damaged"][name]
    if backend == "reference" and message == "rans":
        message = ""  # the reference says more exactly what is wrong with a chunk
    assert message in str(caught.value)


def test_golden_damage_has_every_error_of_the_decoders():
    """Each message in the sources of the codecs 3 to 6 is met by some golden frame."""
    source = Path(gradwire.__file__).parent
    files = [
        source / "compress/positions.py",
        source / "kernels/reference/positions.py",
        source / "kernels/reference/grid.py",
    ]
    files += [
        source / "convert" / f"{name}.py"
        for name in (
            "ecq",
            "outliers",
            "segments",
            "levels",
            "level_buckets",
            "level_numbers",
            "sparse",
            "sparse_values",
            "magnitudes",
            "sketch",
        )
    ]
    written = {text for file in files for text in re.findall(r'raise FrameError\(f?"([^"{]*)', file.read_text("utf-8"))}
    met = []
    with use_backend("reference"):
        for name in INDEX["damaged"]:
            try:
                gradwire.decode(golden("damaged", name))
            except FrameError as error:
                met.append(str(error))
    elsewhere = {"not a sparse frame: it does not tell positions"}
    assert {text for text in written if not any(text in message for message in met)} <= elsewhere


# ── the header ────────────────────────────────────────────────────────────────────────────────────


def test_header_by_hand():
    frame = gradwire.codec("none").encode(torch.tensor([[1.0, 2.0, 3.0]]).half())
    # magic, version 1, stored, fp16 with two dimensions; checksum; 6 bytes of payload; shape; values.
    assert frame[:5] == bytes([0x47, 0x57, 1, 0, 1 | 2 << 4])
    assert frame[9:] == bytes([6, 1, 3, 0x00, 0x3C, 0x00, 0x40, 0x00, 0x42])


def test_frame_by_hand():
    """A constant tensor of 40 zeros: fp4, step 1 as bf16, the coder "constant", the symbol in the middle."""
    frame = gradwire.codec("co3").encode(torch.zeros(40))
    assert frame[:5] == bytes([0x47, 0x57, 1, 1, 0 | 1 << 4])
    assert frame[9:] == bytes([5, 40, 0, 0x80, 0x3F, 1, 5])


@for_each("spec", SPECS)
def test_header_is_short(spec):
    """At most 20 bytes beside shape and payload (the page says 10 to 17)."""
    for tensor in (torch.tensor(1.0), torch.zeros(0), gradient(9), gradient(30_000).reshape(10, 3000)):
        frame = gradwire.codec(spec).encode(tensor)
        header = headers.read_header(memoryview(frame))
        assert header.length == plain_decode(frame).header_bytes if len(frame) < 1000 else True
        shape = sum(len(plain_varint(d)) for d in tensor.shape)
        assert 10 <= header.length - shape <= 17
        assert header.frame_length == len(frame)


def test_longest_header():
    assert headers.header_length((), 0) == 10
    assert headers.header_length((), 2**56 - 1) == 17


@given(st.integers(0, 2**56 - 1))
def test_varint(value):
    encoded = varint(value)
    assert encoded == plain_varint(value)
    reader = Reader(memoryview(encoded + b"\xff"))
    assert (reader.varint(2**56), reader.position) == (value, len(encoded))
    with pytest.raises(FrameError):
        Reader(memoryview(encoded[:-1])).varint(2**56)
    if value:
        with pytest.raises(FrameError, match="too large"):
            Reader(memoryview(encoded)).varint(value - 1)


@for_each("data", [b"", b"\x80", b"\x80\x00", b"\xff\x80\x00", b"\xff" * 8 + b"\x01", b"\x80" * 20])
def test_varints_that_are_none(data):
    with pytest.raises(FrameError):
        Reader(memoryview(data)).varint(2**56)


def test_frames_in_a_row():
    frames = [gradwire.codec(spec).encode(gradient(n)) for n, spec in ((0, "none"), (100, "co3"), (9, "fp16"))]
    assert [bytes(f) for f in headers.split(memoryview(b"".join(frames)))] == frames
    assert headers.split(memoryview(b"")) == []
    for cut in range(1, len(frames[-1])):
        with pytest.raises(FrameError):
            headers.split(memoryview(b"".join(frames)[:-cut]))
    with pytest.raises(FrameError):
        headers.split(memoryview(frames[0] + b"\0"))


# ── damage ────────────────────────────────────────────────────────────────────────────────────────

SMALL = ["stored-float32", "stored-bool", "stored-empty", "cast-bf16-float32", "fp4-rans-gennorm-float32",
         "fp4-rans-histogram-bfloat16", "fp4-huffman-histogram-float16", "fp4-huffman-gennorm-float64",
         "fp4-raw-float32", "fp4-constant-float32", "segmented-co3-float32", "rans-3-chunks-140",
         "rans-64-lanes", "ue3m2b5-rans", "e3m2b3n-huffman", "fp8-huffman", "grid-outliers", "grid-segmented-empty",
         "levels-thirds", "levels-one-segment", "sparse-classes-1", "sparse-all-golomb", "sketch-ties"]  # fmt: skip


@for_each("name", SMALL)
def test_frames_cut_anywhere(backend, name):
    frame = golden("valid", name)
    for length in range(len(frame)):
        check_fails(frame[:length])
        if length > 9:
            check_fails_or_decodes(repair(frame[:length]))


@for_each("name", SMALL)
def test_every_bit_flipped(backend, name):
    """The checksum finds all of them."""
    frame = golden("valid", name)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        check_fails(bytes(damaged))


@for_each("name", SMALL)
def test_every_bit_flipped_and_the_checksum_repaired(backend, name):
    frame, start = golden("valid", name), time.perf_counter()
    for bit in range(0, 8 * len(frame), 3 if backend == "reference" else 1):  # every third one: all places in a byte
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        check_fails_or_decodes(repair(bytes(damaged)))
    assert time.perf_counter() - start < 60


@for_each("name", SMALL)
def test_every_byte_missing_or_doubled(backend, name):
    frame = golden("valid", name)
    for at in range(9, len(frame)):
        header = headers.read_header(memoryview(frame))
        for changed in (frame[:at] + frame[at + 1 :], frame[: at + 1] + frame[at:]):
            check_fails_or_decodes(repair(changed))
            if at >= header.length:
                payload = changed[header.length :]
                check_fails_or_decodes(assemble(payload, header.shape, header.codec, header.dtype, header.flags))


@given(payload=st.binary(max_size=80), codec=st.integers(0, 2), dtype=st.sampled_from(DTYPES),
       flags=st.integers(0, 3), shape=st.lists(st.integers(0, 40), max_size=3))  # fmt: skip
def test_noise_as_payload(backend, payload, codec, dtype, flags, shape):
    check_fails_or_decodes(assemble(payload, tuple(shape), codec, dtype, flags))


@given(st.binary(max_size=60))
def test_noise(data):
    check_fails(data)
    check_fails(b"GW\x01" + data) if len(data) < 6 else check_fails_or_decodes(repair(b"GW\x01" + data))


def test_newer_versions_say_so():
    frame = bytearray(gradwire.codec("co3").encode(gradient(50)))
    for version in (0, 2, 3, 255):
        frame[2] = version
        check_fails(repair(bytes(frame)), f"frame has version {version}; this gradwire reads version 1")
        check_fails(bytes(frame), "upgrade it")


# ── hostile sizes ─────────────────────────────────────────────────────────────────────────────────

CONSTANT = bytes([0, 0x80, 0x3F, 1, 5])
ONE_LANE = bytes([0, 0x80, 0x3F, 3 | 1 << 2 | 8 << 4, 60, 255, 0]) + (2**14).to_bytes(3, "little")


@for_each("shape", [(2**40,), (2**47,), (2**20, 2**20), (2**48 - 1,), (2**24, 2**24 - 1)])
@for_each("payload", [CONSTANT, ONE_LANE, b""], ids=["constant", "rans", "empty"])
@for_each("codec", [0, 1, 2])
def test_huge_sizes_are_refused_before_memory_is_taken(codec, payload, shape):
    frame = assemble(payload, shape, codec)
    check_fails(frame, "limit is max_elements=100000")
    with pytest.raises(FrameError, match=r"limit is max_elements=268435456|wrong length"):
        gradwire.decode(frame)


@pytest.mark.parametrize("shape", [(2**48,), (2**48 + 1,), (2**24, 2**24), (2**30, 2**30), (2**47, 2**47, 2**47)])
def test_no_tensor_has_2_to_the_48_elements(shape):
    with pytest.raises(FrameError):
        headers.read_header(memoryview(assemble(CONSTANT, shape, 1)))


@pytest.mark.parametrize("shape", [(2**47, 0), (0, 2**47, 2**47), (2**40, 2**40, 0)])
def test_huge_shapes_of_nothing(shape):
    check_fails_or_decodes(assemble(b"", shape, 0))


def test_limit_holds_for_the_product_of_the_dimensions():
    check_fails(assemble(CONSTANT, (400, 400), 1), "declares 160000 elements")
    assert gradwire.decode(assemble(CONSTANT, (300, 300), 1), max_elements=90_000).numel() == 90_000


def test_default_limit_grows_with_the_frame():
    """2²⁸ elements, or 4096 for each byte: a constant frame is not stopped at a hundred thousand."""
    assert gradwire.decode(assemble(CONSTANT, (1000, 1000), 1)).numel() == 10**6
    check_fails_or_decodes(assemble(CONSTANT, (2**28 + 1,), 1))
    with pytest.raises(FrameError, match="max_elements"):
        gradwire.decode(assemble(CONSTANT, (2**28 + 1,), 1))


def test_sizes_of_inner_fields():
    """Counts and lengths inside the payload that promise more than there is."""
    huge = plain_varint(2**50)
    for payload in (
        bytes([0]) + huge + bytes([1, 0x80, 0x3F]),  # segments
        bytes([0, 1]) + huge + bytes([0x80, 0x3F]),  # length of a segment
        ONE_LANE[:6] + bytes([128]) + huge + bytes(8),  # chunks
        ONE_LANE[:6] + bytes([128, 2]) + b"\xff\xff\xff\xff" + bytes(8),  # length of a chunk
    ):
        for flags in (0, 2):
            check_fails(assemble(payload, (1000,), 1, flags=flags))


def test_time_is_bounded_by_the_limit(backend):
    """All of the mass on one symbol: no bytes are consumed, so that only the count ends the loop."""
    head = bytes([0, 0x80, 0x3F, 3 | 2 << 2 | 8 << 4])
    table = bytes([0xFF, 0x03])  # ten times "1", a frequency of 0: the symbol of zero has the rest, 2⁸
    frame = assemble(head + table + bytes([0]) + (2**14).to_bytes(3, "little"), (LIMIT,), 1)
    start = time.perf_counter()
    assert not gradwire.decode(frame, max_elements=LIMIT).any()
    assert time.perf_counter() - start < 20


def test_a_failed_decode_into_keeps_shape_and_dtype(backend):
    frame = bytearray(gradwire.codec("co3").encode(gradient(3000)))
    frame[200] ^= 1
    out = torch.zeros(3000)
    with pytest.raises(FrameError):
        gradwire.decode(repair(bytes(frame)), out=out)
    assert out.shape == (3000,) and out.isfinite().all()


@pytest.mark.thorough
def test_fuzzed_frames():
    """Short runs of tests/fuzz_decode.py, in a process of their own for the sake of its memory figure."""
    runs = [["--frames", "3000", "--seed", "1", *extra] for extra in ([], ["--repair-checksum"])]
    code = f"import sys, fuzz_decode as f; sys.exit(max(f.run(f.parse(options)) for options in {runs}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3000 frames, 0 failures") == 2, done.stdout


def test_the_fuzzer_notices_failures(tmp_path, monkeypatch, capsys):
    import fuzz_decode

    def broken(frame: bytes, **options: object) -> torch.Tensor:
        if len(frame) % 3 == 0:
            raise IndexError("past the end")
        raise FrameError("as it should be")

    monkeypatch.setattr(fuzz_decode, "valid_frames", lambda: [])
    monkeypatch.setattr(fuzz_decode, "mutate", lambda frames, rng: rng.randbytes(rng.randrange(9)))
    monkeypatch.setattr(gradwire, "decode", broken)
    assert fuzz_decode.run(fuzz_decode.parse(["--frames", "50", "--save", str(tmp_path)])) == 1
    assert "IndexError" in capsys.readouterr().out
    saved = list(tmp_path.glob("*.frame"))
    assert saved and all(len(path.read_bytes()) % 3 == 0 for path in saved)
