"""Error memory that goes to a buffer of its own is written past the caches from 2¹⁸ entries on: the same numbers."""

from __future__ import annotations

import torch

import gradwire
from support.cases import for_each
from support.helpers import bits

SPECS = ("co3", "co3:coder=huffman", "ecq:rate=1", "ecq:rate=3", "sbc:p=0.01", "topk:p=0.01", "stc:p=0.001")


@for_each("spec", SPECS)
@for_each("offset", [0, 1, 16])
@for_each("extra", [0, 5])
def test_in_place_and_apart_are_the_same(spec: str, offset: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(offset)
    count = 2**18 + extra
    gradient = torch.randn(count, generator=generator)
    memory = torch.randn(count, generator=generator)
    codec = gradwire.codec(spec)
    out = torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
    apart = torch.empty(count + offset)[offset:]  # on a line of its own, and not
    length = codec.encode_into(gradient, out, residual=memory, residual_out=apart, decay=0.9)
    frame = bytes(out[:length].numpy())
    before = memory.clone()
    assert codec.encode_into(gradient, out, residual=memory, decay=0.9) == length
    assert bytes(out[:length].numpy()) == frame
    assert bits(apart) == bits(memory)
    assert bits(memory) != bits(before)
