"""Count-sketch: a baseline that has to keep the promises of every codec."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import gradwire
from gradwire.kernels.reference import sketch as reference
from support.helpers import FLOATS, assemble, check_contract_3, check_same, encode_into, gradient
from support.plain_coders import plain_varint
from support.plain_decoder import plain_decode

SPECS = ("countsketch", "countsketch:ratio=2,rows=5,p=0.5,precision=fp16", "countsketch:ratio=1,rows=1,p=1")


@pytest.mark.parametrize("spec", SPECS)
def test_frames_decode_to_what_the_page_says(spec: str) -> None:
    x = gradient(400, 1)
    tensors = [
        x,
        x[:9],
        x.abs(),
        torch.zeros(50),
        torch.full((50,), 2.0),
        x * 1e-38,
        x.sign() * 3e38,
        x.round(decimals=3),
    ]
    for seed, tensor in enumerate(tensors):
        for dtype in FLOATS:
            if bool(torch.isfinite(tensor.to(dtype)).all()):
                frame = gradwire.codec(spec).encode(tensor.to(dtype), seed=(seed << 40) + (2**64 - 2))
                check_same(gradwire.decode(frame), plain_decode(frame).tensor)


@pytest.mark.parametrize("spec", SPECS)
def test_error_feedback_conserves_what_receivers_decode(spec: str) -> None:
    for dtype in FLOATS:
        grad, memory = gradient(700, 2).to(dtype), gradient(700, 4)
        before = memory.clone()
        frame = encode_into(gradwire.codec(spec), grad, residual=memory, decay=0.9, seed=1)
        check_contract_3(gradwire.decode(frame), memory, grad, before, 0.9)


def test_a_memory_of_its_own_place_is_the_one_that_is_updated_in_place() -> None:
    codec, grad, memory = gradwire.codec("countsketch"), gradient(3000, 2), gradient(3000, 4)
    for decay in (1.0, 0.9):
        updated, written = memory.clone(), torch.empty(3000)
        frames = [
            encode_into(codec, grad, residual=updated, decay=decay, seed=1),
            encode_into(codec, grad, residual=memory, residual_out=written, decay=decay, seed=1),
        ]
        assert frames[0] == frames[1]
        check_same(updated, written)


def test_large_entries_are_found() -> None:
    x = gradient(20_000, 1)
    heavy = torch.arange(17, 20_000, 1999)
    x[heavy] = 3.0 * torch.tensor([1, -1] * 5 + [1])[: len(heavy)]
    sent = gradwire.decode(gradwire.codec(f"countsketch:rows=5,p={len(heavy) / 20_000}").encode(x))
    assert sent.nonzero().flatten().tolist() == heavy.tolist()
    assert torch.allclose(sent[heavy], x[heavy], rtol=0.05)


def test_hashes_spread_evenly() -> None:
    """χ² of columns and signs, at an error probability of 10⁻⁶ (z = 4.9, with χ² nearly normal)."""
    for row in range(5):
        column, sign = reference.hashed(row, 123, 97, 0, 97_000)
        counts = np.bincount(column.numpy(), minlength=97)
        assert abs(((counts - 1000) ** 2 / 1000).sum() - 96) < 4.9 * (2 * 96) ** 0.5
        assert abs(int(sign.sum())) < 4.9 * 97_000**0.5
    one, other = (reference.hashed(row, 123, 97, 0, 97_000)[0] for row in (0, 1))
    assert abs(int((one == other).sum()) - 1000) < 4.9 * 1000**0.5


def test_never_adds_more_error_than_it_removes() -> None:
    """On gradients without large entries as well: else error feedback would grow without end."""
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(5000).astype(np.float32))
    memory = torch.zeros(5000)
    for seed in range(20):
        before = (x + memory).norm()
        encode_into(gradwire.codec("countsketch:ratio=20,p=0.05"), x, residual=memory, seed=seed)
        assert memory.norm() <= before * 1.000001


@pytest.mark.parametrize("spec", SPECS)
def test_non_finite_gradients_travel_as_they_are(spec: str) -> None:
    tensor, memory = gradient(600), gradient(600, 1)
    tensor[5] = float("nan")
    before = memory.clone()
    check_same(gradwire.decode(encode_into(gradwire.codec(spec), tensor, residual=memory)), tensor)
    check_same(memory, before)


@pytest.mark.parametrize(
    "spec, says",
    [
        ("p=0", "from 1e-06 to 1"),
        ("p=2", "to 1"),
        ("rows=2", "steps of 2"),
        ("ratio=0.5", "from 1"),
        ("rows=9", "to 7"),
    ],
)
def test_bad_parameters_say_what_is_allowed(spec: str, says: str) -> None:
    with pytest.raises(gradwire.SpecError, match=says):
        gradwire.codec(f"countsketch:{spec}")


def payload(
    table: int = 1, columns: int = 2, kept: int = 1, scale: float = 1.0, cells: tuple[float, ...] = (1, 2)
) -> bytes:
    side = bytes([table]) + plain_varint(columns) + plain_varint(kept) + struct.pack("<fQ", scale, 7)
    return side + b"".join(struct.pack("<f", x) for x in cells)


def test_hostile_payloads_are_frame_errors() -> None:
    assert int((gradwire.decode(assemble(payload(), (20,), 6)) != 0).sum()) == 1
    for bad in (
        payload(table=0), payload(table=2), payload(table=9), payload(table=33), payload(table=65), payload(columns=0),
        payload(columns=3), payload(columns=21), payload(kept=0), payload(kept=21), payload(scale=-1), payload(scale=2),
        payload(scale=-0.0), payload(scale=float("nan")), payload(cells=(1, float("inf"))), payload(cells=(1,)),
        payload(cells=(1, 2, 3)), payload() + b"\0", payload()[:-1], payload()[:10], b"",
    ):  # fmt: skip
        with pytest.raises(gradwire.FrameError):
            gradwire.decode(assemble(bad, (20,), 6))
    for shape, dtype, flags in (((0,), torch.float32, 0), ((20,), torch.int32, 0), ((20,), torch.float32, 2)):
        with pytest.raises(gradwire.FrameError):
            gradwire.decode(assemble(payload(), shape, 6, dtype, flags))


@pytest.mark.parametrize("spec", SPECS)
def test_the_largest_numbers_leave_a_finite_memory(spec: str) -> None:
    """An estimate with the wrong sign is twice as far away as fp32 reaches."""
    x = gradient(400, 1).sign() * torch.finfo(torch.float32).max
    after = torch.empty(400)
    encode_into(gradwire.codec(spec), x, residual_out=after)
    assert bool(torch.isfinite(after).all())
