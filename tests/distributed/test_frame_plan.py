"""Which tensors share a frame, and that it changes no tensor's values."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from support.helpers import encode_into, gradient

SHAPES = {
    "bias": (10,), "first": (16, 4096), "second": (3, 700), "third": (300, 400), "fourth": (300, 400),
    "fifth": (400, 300), "large": (512, 512),
}  # fmt: skip


def frames_of(spec: str, joins: bool = True) -> list[list[str]]:
    parts = whole_tensors([(name, torch.ones(shape)) for name, shape in SHAPES.items()])
    return [plan.names for plan in ModelRecipes(spec).plan_frames(parts, clock=0, joins=joins)]


@pytest.mark.parametrize("spec", ["co3", "co3:format=fp8,coder=huffman", "gennorm"])
def test_small_tensors_share_a_frame_and_larger_ones_do_with_their_like(spec: str) -> None:
    own = [["first"], ["third", "fourth"], ["fifth"], ["large"]]
    assert sorted(frames_of(spec)) == sorted([["bias", "second"], *own])
    alone = [[name] for name in SHAPES if name not in ("bias", "second")]
    assert sorted(frames_of(spec, joins=False)) == sorted([["bias", "second"], *alone])


@pytest.mark.parametrize("spec", ["ecq", "qsgd", "topk:p=0.1,mask=off", "co3:rounding=stochastic"])
def test_tensors_that_would_take_more_bytes_have_frames_of_their_own(spec: str) -> None:
    assert all([name] in frames_of(spec) for name in SHAPES if name not in ("bias", "second"))


@pytest.mark.parametrize("spec", ["co3", "co3:format=e5m2"])
def test_segments_have_the_values_and_the_memory_that_each_has_alone(spec: str) -> None:
    sizes = [10, 65_535, 2100, 120_000, 120_000]  # two of them are fitted to a sample
    tensor, memory = gradient(sum(sizes)), gradient(sum(sizes), 1) / 3
    tensor[10 : 10 + 65_535] *= 1e-6
    tensor[-120_000:] = 0
    tensor[-1] = memory[-1] = 2.0  # nearly all of it is zero
    memory[-120_000:-1] = 0
    codec, left = gradwire.codec(spec), memory.clone()
    frame = encode_into(codec, tensor, residual=left, decay=0.9, segments=sizes)
    decoded = gradwire.decode(frame)
    for part, alone, before, after in zip(*(x.split(sizes) for x in (decoded, tensor, memory, left)), strict=True):
        own = before.clone()
        assert torch.equal(part, gradwire.decode(encode_into(codec, alone.clone(), residual=own, decay=0.9)))
        assert torch.equal(own, after)
