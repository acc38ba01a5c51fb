"""Frames and decoded values do not depend on what else a program has told torch: default types, devices and modes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

import gradwire
from gradwire import codecs
from gradwire.catalogue import parse_recipe
from support.cases import for_each
from support.helpers import BACKENDS, bits, gradient, use_backend
from support.torch_settings import SETTINGS, forget

NAMES = [entry.name for entry in gradwire.recipes()]
LARGE = 70_000  # entries: of so many, kernels look at some alone before they choose a step


def coded(name: str, count: int) -> list[bytes]:
    """All that a recipe makes of a tensor: frames, decoded values and what it remembers."""
    codec, decay, found = gradwire.codec(name), parse_recipe.recipe(name).decay, []
    for dtype in (torch.float32, torch.bfloat16) if count < LARGE else (torch.float32,):
        tensor, memory = gradient(count).to(dtype), gradient(count, 1)
        room = codec.max_frame_bytes(tensor) + 36
        out = torch.zeros(room, dtype=torch.uint8, device="cpu")
        for segments in ((), (count // 2, 1, count - 1 - count // 2)) if 10 < count < LARGE else ((),):
            length = codec.encode_into(tensor, out, residual=memory, decay=decay, seed=7, segments=segments)
            frame, total = out[:length].numpy(), gradient(count, 2)
            decoded = gradwire.decode(frame)
            codecs.decode_payload(*codecs.open_frame(frame), total, weight=0.5, accumulate=True)
            assert (decoded.dtype, decoded.device.type) == (dtype, "cpu")
            found += [bits(out[:length]), bits(decoded), bits(total), bits(memory)]
    return [*found, codec.encode(gradient(count))]


@functools.cache
def expected(backend: str, name: str, count: int) -> list[bytes]:
    with use_backend(backend):
        return coded(name, count)


def check(backend: str, name: str, setting: str, counts: Iterable[int]) -> None:
    for count in counts:
        normal = expected(backend, name, count)
        with use_backend(backend):
            forget()
            with SETTINGS[setting]():
                assert coded(name, count) == normal, count
            if count < LARGE:
                assert coded(name, count) == normal, f"{count}, with what was cached there"


@for_each("name", NAMES)
@for_each("setting", SETTINGS)
def test_recipes(name: str, setting: str) -> None:
    check(BACKENDS[-1], name, setting, (1, 1000, LARGE))


@for_each("name", NAMES)
@for_each("setting", SETTINGS)
def test_reference(name: str, setting: str) -> None:
    check(BACKENDS[0], name, setting, (1, 100))
