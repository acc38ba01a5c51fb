"""`gradwire inspect` on frames and on tensor files, sound, damaged and hostile."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import gradwire
from gradwire.cli import inspect as command
from gradwire.frame import headers
from gradwire.inspection import frames, tensor_files, tensors
from support.cases import for_each
from support.helpers import assemble, encode_into, gradient, repair
from support.plain_decoder import plain_decode

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command()(command.inspect)
SOURCES = Path(gradwire.__file__).parents[1]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def inspect(*arguments: object) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def figures(path: Path, *arguments: object) -> dict[str, Any]:
    """What the command writes to its JSON file."""
    target = path.parent / "figures.json"
    inspect(path, "--json", target, *arguments)
    return json.loads(target.read_text(encoding="utf-8"), parse_constant=pytest.fail)  # no NaN, no Infinity


def refuses(path: Path, *arguments: object, match: str) -> None:
    """The error is ours, and fits on one line."""
    with pytest.raises(gradwire.GradwireError, match=match) as caught:
        inspect(path, *arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ── frames ────────────────────────────────────────────────────────────────────────────────────────

SPECS = (
    "co3", "co3:model=histogram", "co3:coder=huffman", "co3:coder=raw", "co3:format=fp8",
    "co3:format=e2m3b0f", "gennorm", "fp16", "none",
)  # fmt: skip
CODERS = ["raw", "constant", "huffman", "rans"]


@for_each("spec", SPECS)
def test_frame_report_says_what_the_bytes_say(spec: str) -> None:
    frame = gradwire.codec(spec).encode(gradient(3000).view(30, 100))
    report, plain = frames.describe(frame), plain_decode(frame)
    assert (report.version, report.shape, report.dtype) == (1, (30, 100), "float32")
    assert report.header_bytes == plain.header_bytes
    assert report.frame_bytes == len(frame)
    assert report.ratio == pytest.approx(12_000 / len(frame))
    assert report.bits_per_entry == pytest.approx(8 * len(frame) / 3000)
    if plain.codec != headers.MINIFLOAT:
        assert report.codec == {headers.STORED: "stored", headers.CAST: "cast"}[plain.codec]
        assert report.symbol_bytes == len(plain.payload)
        return
    assert report.codec == "minifloat"
    assert report.format is not None and report.format in (spec.partition("format=")[2], "fp4", "fp8")
    assert report.coder == CODERS[plain.coder]
    assert report.model == [None, "gennorm", "histogram"][plain.model]
    assert report.steps == [step for _, step in plain.segments]
    layout = (report.precision or 0, report.lanes or 0, report.chunks or 0)
    assert layout == (plain.precision, plain.lanes, plain.chunks)
    assert (report.frequencies or []) == plain.frequencies
    if plain.model == 1:
        index, zero_mass = plain.payload[4:6]
        assert report.beta == pytest.approx(0.1 * 40 ** (index / 127))
        assert report.zero_mass == zero_mass / 256
        assert report.model_bytes == 3


FAMILIES = {
    "orq:levels=9,bucket=700": {"levels": 9, "bucket": 700, "buckets": 5, "table": "explicit, bfloat16"},
    "linear:levels=2,bucket=0,precision=fp16": {"levels": 2, "bucket": "whole", "table": "even, float16"},
    "signsgd": {"levels": 2, "bucket": 512, "buckets": 6, "table": "symmetric, bfloat16"},
    "sbc": {"sent": 30, "values": "one value", "value bytes": 4},
    "stc:k=100,positions=rans": {"sent": 100, "values": "one magnitude and signs", "value bytes": 17},
    "topk:values=fp16": {"sent": 30, "values": "fp16", "value bytes": 60},
    "topk:values=fp8": {"sent": 30, "values": "minifloat"},
    "m22:bits=3": {"sent": 300, "values": "magnitudes and signs", "levels": 8},
    "countsketch": {"rows": 3, "columns": 100, "kept": 30, "cells": "fp32"},
    "ecq": {},
    "homomorphic:p=all": {"index": "dense", "index bytes": 0, "sketch bytes": 12_000},
    "structured": {"view": "matrix", "rank": 0, "factor bytes": 1, "outliers": 0, "outlier bytes": 0},
}


@pytest.mark.parametrize("spec", FAMILIES)
def test_what_only_some_codecs_have(tmp_path: Path, spec: str) -> None:
    frame = gradwire.codec(spec).encode(gradient(3000).view(30, 100))
    report, plain = frames.describe(frame), plain_decode(frame)
    names = ["stored", "minifloat", "cast", "grid", "levels", "sparse", "sketch", "homomorphic", "structured"]
    assert report.codec == names[plain.codec]
    assert report.details.items() >= FAMILIES[spec].items()
    assert (report.header_bytes, report.frame_bytes) == (plain.header_bytes, len(frame))
    if report.codec == "sparse":
        used = report.details["position bytes"]
        assert used == len(plain.payload) - report.side_bytes - report.details["value bytes"]
        assert report.details["bits per position"] == pytest.approx(8 * used / len(plain.positions), abs=1e-3)
        assert report.coder == ("classes" if plain.kind >> 4 else "golomb")
    elif report.codec not in ("sketch", "homomorphic", "structured"):
        assert report.coder == CODERS[plain.coder]
        assert (report.frequencies or []) == plain.frequencies
    text = inspect(write(tmp_path / "a.gw", frame))
    assert all(name in text for name in report.details)


def test_where_the_bytes_of_a_structured_frame_go(tmp_path: Path) -> None:
    rows, columns = gradient(60, 1, scale=1.0).view(60, 1), gradient(50, 2, scale=1.0)
    kernels = (gradient(640, 3).view(64, 10, 1, 1) * torch.ones(3, 3)) + 1e-5 * gradient(5760, 4).view(64, 10, 3, 3)
    for tensor, view in (
        (rows * columns + 0.5 * gradient(3000, scale=1.0).view(60, 50), "matrix"),
        (kernels, "kernels of 3×3"), (gradient(4100) * 2.0 ** (torch.arange(4100) // 999 * 4), "blocks of "),
        (rows * columns * 0, "matrix"),
    ):  # fmt: skip
        frame = gradwire.codec("structured").encode(tensor)
        report, plain = frames.describe(frame), plain_decode(frame)
        assert str(report.details["view"]).startswith(view)
        assert (report.details["rank"], report.header_bytes) == (len(plain.terms), plain.header_bytes)
        assert report.frame_bytes == len(frame)
        if plain.symbols:
            assert report.details["symbols"] == len(plain.levels)
            assert report.details["classes"] > max(plain.classes)
            assert report.details["outliers"] == len(plain.positions)
            assert report.details["class bytes"] + report.details["outlier bytes"] == report.symbol_bytes
        else:
            assert (report.symbol_bytes, report.steps) == (0, [])
        assert all(name in inspect(write(tmp_path / "a.gw", frame)) for name in report.details)


@for_each("spec", ["orq:coder=raw", "sbc:positions=rans", "stc", "m22", "countsketch", "ecq"])
def test_damaged_frames_are_described_or_refused(spec: str) -> None:
    """Whatever a frame with a right checksum says, only FrameError comes of it."""
    frame = gradwire.codec(spec).encode(gradient(300))
    header = headers.read_header(memoryview(frame))
    for at in range(header.length, min(len(frame), header.length + 60)):
        for value in (0, 1, 127, 255):
            with contextlib.suppress(gradwire.FrameError):
                frames.describe(repair(frame[:at] + bytes([value]) + frame[at + 1 :]))
    huge = bytes([3, 0x10, 0, 2, 1, 0]) + bytes(4)  # would be valid, but no one can hold it
    with pytest.raises(gradwire.FrameError, match="too many"):
        frames.describe(assemble(huge, (2**47,), 5))


def test_bytes_of_a_rans_frame() -> None:
    frame = gradwire.codec("co3:model=gennorm").encode(gradient(80_000))
    report = frames.describe(frame)
    assert report.lanes is not None and report.lanes > 1
    assert (report.side_bytes, report.model_bytes) == (3, 3)
    assert report.lane_bytes == 1 + 3 * report.lanes
    assert report.symbol_bytes == len(frame) - report.header_bytes - 6 - report.lane_bytes


def test_one_frame_as_a_table(tmp_path: Path) -> None:
    tensor = gradient(5000).view(50, 100)
    tensor[::3] = 0
    text = inspect(write(tmp_path / "a.gw", gradwire.codec("co3:model=gennorm").encode(tensor)))
    for word in ("minifloat", "fp4", "float32", "50×100", "rans", "gennorm", "ratio", "β", "checksum", "ok"):
        assert word in text
    text = inspect(write(tmp_path / "a.gw", gradwire.codec("co3:model=histogram").encode(tensor)))
    frequencies = plain_decode((tmp_path / "a.gw").read_bytes()).frequencies
    assert " ".join(map(str, frequencies)) in text


def test_segments(tmp_path: Path) -> None:
    codec = gradwire.codec("co3")
    frame = encode_into(codec, torch.cat([gradient(600), 100 * gradient(500)]), segments=[600, 500])
    found = figures(write(tmp_path / "a.gw", frame))["frames"][0]
    assert found["flags"] == ["segmented"]
    assert len(found["steps"]) == 2 and found["steps"][1] > 30 * found["steps"][0]
    assert "2 steps" in inspect(tmp_path / "a.gw")


def message(tmp_path: Path) -> Path:
    content = [gradient(4000), gradient(7), torch.full((40,), torch.nan), torch.zeros(900), torch.arange(5)]
    return write(tmp_path / "message", b"".join(gradwire.codec("co3").encode(t) for t in content))


def test_a_message_of_several_frames(tmp_path: Path) -> None:
    path = message(tmp_path)
    found = figures(path)
    assert found["kind"] == "frames" and found["total"] == 5
    assert [f["codec"] for f in found["frames"]] == ["minifloat", "stored", "stored", "minifloat", "stored"]
    assert found["frames"][2]["flags"] == ["non-finite"]
    assert found["frames"][3]["coder"] == "constant"
    assert found["frames"][4]["dtype"] == "int64"
    assert sum(f["frame_bytes"] for f in found["frames"]) == path.stat().st_size
    assert f"{path.stat().st_size:,}" in inspect(path)
    assert "3 more frames" in inspect(path, "--limit", 2)


def test_damaged_frames(tmp_path: Path) -> None:
    frame = gradwire.codec("co3").encode(gradient(3000))
    path = tmp_path / "a.gw"
    for position in range(2, len(frame), 97):
        damaged = bytearray(frame)
        damaged[position] ^= 0x10
        refuses(write(path, bytes(damaged)), match="frame 1, at byte 0: ")
    for length in (2, 11, 13, 40, len(frame) - 1):
        refuses(write(path, frame[:length]), match="frame 1, at byte 0: .*cut short")
    refuses(write(path, frame + frame[:-1]), match=f"frame 2, at byte {len(frame)}: cut short")
    refuses(write(path, frame + b"tail"), match=f"frame 2, at byte {len(frame)}: ")
    whole = message(tmp_path).read_bytes()
    refuses(write(path, whole[:-1]), "--limit", 1, match="frame 5")


def test_hostile_frames_with_a_right_checksum(tmp_path: Path) -> None:
    """Whatever a byte says, there is a report or our own error."""
    frame = gradwire.codec("co3").encode(gradient(3000))
    refused = 0
    for position in [*range(2, 5), *range(9, 37)]:
        for value in (0, 1, 127, 255):
            hostile = bytearray(frame)
            hostile[position] = value
            try:
                assert frames.describe(repair(bytes(hostile))).frame_bytes == len(frame)
            except gradwire.FrameError:
                refused += 1
    assert refused > 20
    short = bytearray(gradwire.codec("co3").encode(gradient(64)))
    report = frames.describe(bytes(short))
    assert report.lanes == 1
    short[report.header_bytes + report.side_bytes + report.model_bytes] = 6  # 64 states do not fit into what follows
    refuses(write(tmp_path / "a.gw", repair(bytes(short))), match="cut short")


def test_what_a_structured_frame_says(tmp_path: Path) -> None:
    """Its sections add up to the frame, and every cut of its payload is refused or described."""
    kernels = torch.nn.functional.avg_pool2d(gradient(64 * 32 * 144).view(64, 32, 12, 12), 6, 3)
    frame = gradwire.codec("structured").encode(kernels)
    report = frames.describe(frame)
    assert (report.codec, report.frame_bytes, report.shape) == ("structured", len(frame), (64, 32, 3, 3))
    assert report.details["view"] == "kernels of 3×3" and report.details["classes"] >= 1
    assert report.steps and report.symbol_bytes > 0.9 * len(frame)
    text = inspect(write(tmp_path / "a.gw", frame))
    assert all(name in text for name in report.details)
    blocks = frames.describe(gradwire.codec("structured").encode(gradient(20_000)))
    assert str(blocks.details["view"]).startswith("blocks of ") and blocks.details["rank"] == 0
    exact = gradwire.codec("structured:nmse=0.5").encode(torch.ones(64, 64))
    assert frames.describe(exact).frame_bytes == len(exact)
    for end in range(report.header_bytes, len(frame), 97):
        with contextlib.suppress(gradwire.FrameError):
            frames.describe(repair(frame[:end]))


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────


def save(path: Path, named: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: t.numpy() for name, t in named.items()})
    elif path.suffix == ".npy":
        np.save(path, next(iter(named.values())).numpy())
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(named, path)
    else:
        torch.save(named, path)
    return path


NAMED = {
    "conv.weight": gradient(6000, beta=0.5).view(60, 100),
    "conv.bias": gradient(60),
    "steps": torch.arange(3),
}


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".pth", ".safetensors", ".npy"])
def test_all_file_types_give_the_same_figures(tmp_path: Path, suffix: str) -> None:
    found = figures(save(tmp_path / f"file{suffix}", NAMED))
    assert (found["kind"], found["format"], found["file"]) == ("tensors", "fp4", f"file{suffix}")
    by_name = {t["name"]: t for t in found["tensors"]}
    assert set(by_name) == ({"file"} if suffix == ".npy" else {"conv.weight", "conv.bias"})
    expected = tensors.analyse("x", NAMED["conv.weight"]).as_dict()
    weight = by_name["file" if suffix == ".npy" else "conv.weight"]
    assert json.loads(json.dumps(expected | {"name": weight["name"]})) == weight


def test_figures_of_a_tensor() -> None:
    x = gradient(60_000, beta=0.7, scale=1e-3)
    x[::4] = 0
    report = tensors.analyse("x", x.view(600, 100))
    assert report.zeros == 0.25
    assert report.beta == pytest.approx(0.7, rel=0.03) and report.alpha == pytest.approx(1e-3, rel=0.06)
    assert report.w2["gennorm"] < 0.3 * min(report.w2["normal"], report.w2["laplace"])
    assert report.ks["gennorm"] < 0.3 * min(report.ks["normal"], report.ks["laplace"])
    for name, size in report.sizes.items():
        frame = gradwire.codec(f"co3:format={name}").encode(x.view(600, 100))
        decoded = gradwire.decode(frame).flatten()
        assert size.bytes == len(frame) and not size.estimated
        assert size.nmse == pytest.approx(float((decoded - x).square().sum() / x.square().sum()), rel=1e-4)
    counts = np.bincount(plain_decode(gradwire.codec("co3").encode(x)).symbols)
    p = counts[counts > 0] / counts.sum()
    assert report.entropy == pytest.approx(float(-(p @ np.log2(p))), rel=1e-9)
    assert report.entropy < report.bits["gennorm+zeros"]["ideal"] < report.bits["normal"]["ideal"]
    assert report.bits["histogram"]["huffman"] >= report.entropy


def test_structure_of_a_tensor(tmp_path: Path) -> None:
    """Low rank, smooth kernels, and scales of rows are told apart, and each is worth what its frame says."""
    random = torch.Generator().manual_seed(0)
    low = torch.randn(256, 4, generator=random) @ torch.randn(4, 256, generator=random)
    low += torch.randn(256, 256, generator=random) / 2
    smooth = torch.nn.functional.avg_pool2d(gradient(64 * 32 * 144, beta=2.0).view(64, 32, 12, 12), 6, 3)
    scaled = gradient(128 * 256, beta=2.0).view(128, 256) * 2.0 ** -torch.arange(128).div(16).view(-1, 1)
    reports = {n: tensors.analyse(n, t) for n, t in {"low": low, "smooth": smooth, "scaled": scaled}.items()}
    found = {name: report.structure for name, report in reports.items()}
    assert found["low"].rank == 4 and 0 < found["low"].factor_bits < 2 and found["low"].gain is None
    assert found["smooth"].view == "kernels of 3×3" and found["smooth"].gain > 0.02
    assert found["scaled"].view == "matrix" and found["scaled"].rank == 0 and found["scaled"].classes > 4
    for name, tensor in {"low": low, "smooth": smooth, "scaled": scaled}.items():
        s = found[name]
        assert s.nmse == pytest.approx(reports[name].sizes["fp4"].nmse, rel=1e-4)
        for recipe in ("ecq", "structured"):
            frame = gradwire.codec(f"{recipe}:nmse={s.nmse:.6g}").encode(tensor)
            assert s.bits[recipe] == 8 * len(frame) / tensor.numel()
            error = float((gradwire.decode(frame) - tensor).square().sum() / tensor.square().sum())
            assert error == pytest.approx(s.nmse, rel=0.1), "at the same error"
        assert s.bits["structured"] < s.bits["ecq"] < s.bits["co3"] and s.saves > 1.05
    assert tensors.analyse("x", torch.zeros(100, 100)).structure is None
    assert tensors.analyse("x", gradient(100)).structure is None
    text = inspect(save(tmp_path / "a.pt", {"low": low, "smooth": smooth}))
    assert "Structure, and the bits" in text and "kernels of 3×3" in text and "×1." in text


def test_structure_of_a_huge_tensor_is_that_of_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "HUGE", 10_000)
    structure = tensors.analyse("x", gradient(40_000).view(400, 100)).structure
    assert structure.estimated and structure.view == "matrix"


def test_a_huge_tensor_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gradient(40_000)
    whole = tensors.analyse("x", x)
    monkeypatch.setattr(tensors, "HUGE", 10_000)
    sampled = tensors.analyse("x", x)
    assert sampled.sizes["fp4"].estimated and not whole.sizes["fp4"].estimated
    assert sampled.sizes["fp4"].bytes == pytest.approx(whole.sizes["fp4"].bytes, rel=0.05)
    assert sampled.sizes["fp4"].bytes != whole.sizes["fp4"].bytes
    assert sampled.beta == pytest.approx(whole.beta, rel=0.1)


def test_format_option(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", NAMED)
    found = figures(path, "--format", "e3m0b2", "--tensor", "conv.w*")
    assert [t["name"] for t in found["tensors"]] == ["conv.weight"]
    assert list(found["tensors"][0]["sizes"]) == ["fp4", "fp8", "e2m1", "e4m3", "e3m0b2"]
    eight, four = (figures(path, "--format", f)["tensors"][0]["entropy"] for f in ("fp8", "fp4"))
    assert eight > four + 2
    refuses(path, "--format", "fp5", match="unknown format 'fp5'")
    refuses(path, "--format", "ue2m1b1", match="no sign bit")


def test_limit_takes_the_largest_in_order(tmp_path: Path) -> None:
    named = {f"layer{i}": gradient(100 * (1 + i * 7 % 5)) for i in range(5)}
    path = save(tmp_path / "a.npz", named)
    assert [t["name"] for t in figures(path, "--limit", 2)["tensors"]] == ["layer2", "layer4"]
    assert len(figures(path, "--limit", 0)["tensors"]) == 5
    assert "3 smaller tensors not shown" in inspect(path, "--limit", 2)


def test_nested_dicts_and_odd_tensors(tmp_path: Path) -> None:
    half = gradient(2000).to(torch.bfloat16)
    knot: dict[str, Any] = {"w": gradient(50)}
    knot["self"] = knot
    content = {"model": {"a": [half, {"b": gradient(30, scale=1.0).double()}]}, "epoch": 3, "knot": knot,
               "sparse": gradient(100).view(10, 10).to_sparse()}  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    found = {t["name"]: t for t in figures(tmp_path / "a.pt")["tensors"]}
    assert set(found) == {"model.a.0", "model.a.1.b", "knot.w", "sparse"}
    assert found["model.a.0"]["dtype"] == "bfloat16" and found["model.a.0"]["dense_bytes"] == 4000
    assert found["sparse"]["entries"] == 100 and found["sparse"]["beta"]


def test_tensors_without_a_distribution(tmp_path: Path) -> None:
    named = {
        "nan": torch.tensor([1.0, torch.nan] * 20), "inf": torch.tensor([torch.inf]), "good": gradient(500),
        "zero": torch.zeros(100), "empty": torch.zeros(0), "same": torch.full((50,), 2.0),
        "scalar": torch.tensor(3.0),
    }  # fmt: skip
    path = save(tmp_path / "a.pt", named)
    found = {t["name"]: t for t in figures(path, "--plot", tmp_path / "a.png")["tensors"]}
    notes = {name: t["note"] for name, t in found.items()}
    assert notes == {
        "nan": "non-finite", "inf": "non-finite", "good": "", "zero": "all zero", "empty": "empty",
        "same": "constant", "scalar": "constant",
    }  # fmt: skip
    assert not found["nan"]["sizes"] and found["nan"]["beta"] is None
    assert found["zero"]["sizes"]["fp4"]["bytes"] < 40
    assert "non-finite" in inspect(path)
    only_nan = save(tmp_path / "b.pt", {"nan": named["nan"]})
    assert "non-finite" in inspect(only_nan)
    refuses(only_nan, "--plot", tmp_path / "b.png", match="nothing to plot")


def test_tables_fit_into_100_columns(tmp_path: Path) -> None:
    names = ["transformer.h.10.attn.c_attn.weight", "blocks[bold].norm", "q" * 80]
    named = {name: 1e-7 * gradient(4000).view(2, 20, 100) for name in names}
    lines = inspect(save(tmp_path / "a.pt", named), "--format", "e4m3b10").splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines), "nothing is cut off"
    for name in names[:2]:
        assert sum(name in line for line in lines) == 7, "whole in each table"
    assert "".join(lines).count("q") == 7 * 80 + 1, "and that of ecq"
    wide = b"".join(gradwire.codec("co3").encode(gradient(6000).view(1, 10, 20, 30)) for _ in range(3))
    assert max(len(line) for line in inspect(write(tmp_path / "b", wide)).splitlines()) <= 100


# ── files that cannot be read ─────────────────────────────────────────────────────────────────────


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def with_shape(shape: str) -> bytes:
    """The bytes of a .npy file of four floats that claims another shape."""
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }" % shape  # noqa: UP031
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Harmful:
    """Runs a function of its choice where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return pytest.fail, ("unpickled",)


FLOATS, OBJECTS = np.ones(500, dtype=np.float32), np.array([Harmful()], dtype=object)
BAD_FILES = {
    "empty.npy": (b"", "is empty"),
    "unknown.bin": (b"\x00\x01\x02", "neither a gradwire frame .* nor a tensor file .*safetensors"),
    "text.gw": (b"hello", "neither a gradwire frame"),
    "objects.npy": (npy(OBJECTS, allow_pickle=True), "holds Python objects"),
    "objects.npz": (zipped(a=npy(OBJECTS, allow_pickle=True)), "holds Python objects"),
    "huge.npy": (with_shape("(1099511627776,)"), "cut short"),
    "huge.npz": (zipped(a=with_shape("(1099511627776,)")), "cut short"),
    "negative.npy": (with_shape("(-4,)"), "cannot read"),
    "short.npy": (npy(FLOATS)[:-9], "cut short"),
    "noise.npy": (b"\x93NUMPY\x01\x00\xff\xff{'a", "cannot read"),
    "short.npz": (zipped(a=npy(FLOATS))[:-60], "cannot read"),
    "noise.npz": (b"PK\x03\x04 and no more", "cannot read"),
    "integers.npy": (npy(np.arange(9)), "no float tensors"),
    "strings.npz": (zipped(a=npy(np.array(["a", "b"]))), "no float tensors"),
    "objects.pt": (saved({"a": Harmful()}), "holds Python objects"),
    "short.pt": (saved({"a": torch.ones(500)})[:-200], "cannot read"),
    "noise.pth": (b"\x80\x02 no pickle", "cannot read"),
    "nothing.pt": (saved({"epoch": 3}), "no float tensors"),
    "short.safetensors": (b"\xff\x00\x00\x00\x00\x00\x00\x00{}", "cannot read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path: Path, name: str) -> None:
    content, match = BAD_FILES[name]
    refuses(write(tmp_path / name, content), match=match)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    refuses(tmp_path / "missing.npz", match="cannot read .*missing.npz: No such file")
    refuses(tmp_path, match="Is a directory")
    path = save(tmp_path / "a.npz", NAMED)
    refuses(path, "--tensor", "*.gamma", match=r"matches '\*.gamma'; there are: conv.weight, conv.bias")
    refuses(path, "--json", tmp_path / "no" / "b.json", match="cannot write .*b.json: No such file")
    refuses(path, "--plot", tmp_path / "no" / "b.png", match="cannot write .*b.png: No such file")


def test_a_view_of_one_number_is_not_taken_for_a_huge_tensor(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(2**45)}, tmp_path / "a.pt")
    refuses(tmp_path / "a.pt", match="larger than the file")
    torch.save({"a": torch.ones(1).expand(1000)}, tmp_path / "a.pt")
    assert tensor_files.load(tmp_path / "a.pt")[0][1].numel() == 1000


# ── extras, the picture, progress, the program ────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", [".png", pytest.param(".pdf", marks=pytest.mark.thorough)])
def test_plot(tmp_path: Path, suffix: str) -> None:
    named = {f"layer{i}": gradient(3000 + i, beta=0.3 + 0.2 * i) for i in range(8)}
    target = tmp_path / f"fits{suffix}"
    inspect(save(tmp_path / "a.npz", named), "--plot", target)
    content = target.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]) and len(content) > 20_000


def test_plot_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "analyse", lambda *_: pytest.fail("too late"))
    path = save(tmp_path / "a.npz", NAMED)
    refuses(path, "--plot", tmp_path / "fits.docx", match="must end in .png, .pdf, .svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(path, "--plot", tmp_path / "fits.png", match=r"pip install 'gradwire\[plot\]'")
    refuses(message(tmp_path), "--plot", tmp_path / "fits.png", match="holds frames")


def test_safetensors_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    path = write(tmp_path / "a.safetensors", b"anything")
    refuses(path, match=r"pip install 'gradwire\[safetensors\]'")


def test_progress_only_if_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    monkeypatch.setattr(command.Progress, "start", lambda self: started.append(time.monotonic()))
    path = save(tmp_path / "a.npz", NAMED)
    inspect(path)
    assert not started and command.BAR_AFTER == 2.0
    analyse = tensors.analyse

    def slowly(*arguments: Any) -> tensors.TensorReport:
        time.sleep(0.1)
        return analyse(*arguments)

    monkeypatch.setattr(tensors, "analyse", slowly)
    monkeypatch.setattr(command, "BAR_AFTER", 0.05)
    begin = time.monotonic()
    inspect(path)
    assert len(started) == 1 and started[0] - begin >= 0.05


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "COLUMNS": "100"}
    program = [sys.executable, "-m", "gradwire.cli", "inspect", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.thorough
def test_the_program(tmp_path: Path) -> None:
    frame = gradwire.codec("co3").encode(gradient(3000))
    good = run(write(tmp_path / "a.gw", frame))
    assert good.returncode == 0 and "minifloat" in good.stdout
    bad = run(write(tmp_path / "a.gw", frame[:-1] + bytes([frame[-1] ^ 1])))
    assert bad.returncode == 1 and not bad.stdout
    assert bad.stderr.splitlines()[-1] == "error: frame 1, at byte 0: checksum mismatch: the frame is damaged"
    assert "Traceback" not in bad.stderr


def test_help_has_examples() -> None:
    text = inspect("--help")
    for word in ("--tensor", "--limit", "--json", "--plot", "--format", "gradwire inspect gradients.pt"):
        assert word in text
