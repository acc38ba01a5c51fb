"""What every recipe in the catalogue promises, whatever it is: a new one is held to it by being listed."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import FrameError
from gradwire.catalogue import parse_recipe
from gradwire.cli import main
from gradwire.frame import headers
from support.cases import for_each
from support.helpers import (
    BACKENDS,
    FLOATS,
    assemble,
    bits,
    check_contract_3,
    check_same,
    encode_into,
    gradient,
    use_backend,
)
from support.plain_decoder import plain_decode

NAMES = [entry.name for entry in gradwire.recipes()]
SHAPES = [(), (1,), (3, 0, 2), (7,), (40, 30)]
every_recipe = for_each("name", NAMES)


@every_recipe
def test_canonical_spec_rebuilds_the_recipe(name: str) -> None:
    recipe = parse_recipe.recipe(name)
    assert recipe.spec.partition(":")[0] == name
    assert parse_recipe.recipe(recipe.spec) == recipe and str(parse_recipe.recipe(recipe.spec)) == recipe.spec
    codec = gradwire.codec(name)
    again = gradwire.codec(str(codec))
    assert again == codec and str(again) == str(codec)
    assert again.encode(gradient(500)) == codec.encode(gradient(500))


@every_recipe
def test_round_trip(name: str) -> None:
    """Shape and dtype come back, with the values that the page says, and the same bits from every backend."""
    codec = gradwire.codec(name)
    for dtype in FLOATS:
        for shape in SHAPES:
            tensor = gradient(math.prod(shape), len(shape)).to(dtype).reshape(shape)
            frames = set()
            for backend in (BACKENDS[0], BACKENDS[-1]):
                with use_backend(backend):
                    frame = codec.encode(tensor)
                    check_same(gradwire.decode(frame), plain_decode(frame).tensor)
                    frames.add(frame)
            assert len(frames) == 1
            decoded = gradwire.decode(frame)
            assert (decoded.shape, decoded.dtype) == (shape, dtype) and bool(decoded.isfinite().all())


@every_recipe
def test_what_was_not_sent_is_remembered(name: str) -> None:
    """ĝ + e′ = g + γe through the bytes, step after step, with the same memory on every backend."""
    codec, decay = gradwire.codec(name), parse_recipe.recipe(name).decay
    for dtype in FLOATS:
        memory = torch.zeros(700)
        for step in range(3):
            grad, before = gradient(700, step, scale=10.0**-step).to(dtype), memory.clone()
            found = set()
            for backend in BACKENDS:
                with use_backend(backend):
                    memory = before.clone()
                    frame = encode_into(codec, grad, residual=memory, decay=decay, seed=step)
                    found.add((frame, bits(memory)))
            assert len(found) == 1
            check_contract_3(gradwire.decode(frame), memory, grad, before, decay)


@every_recipe
def test_room_that_was_announced_is_enough(name: str) -> None:
    """And nothing beyond it is touched."""
    codec = gradwire.codec(name)
    for count in (1, 9, 33, 1000):
        for tensor in (gradient(count), gradient(count).double(), gradient(count).sign() * 3e38):
            room = codec.max_frame_bytes(tensor)
            memory = torch.zeros(count)
            out = torch.full((room + 64,), 0xA5, dtype=torch.uint8)
            length = codec.encode_into(tensor, out[:room], residual=memory)
            assert length <= room and bool((out[room:] == 0xA5).all())
            assert out[:length].numpy().tobytes() == encode_into(codec, tensor, residual=torch.zeros(count))


@every_recipe
def test_non_finite_gradients_travel_as_they_are(name: str) -> None:
    codec = gradwire.codec(name)
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in FLOATS:
            tensor, memory = gradient(300).to(dtype), gradient(300, 1)
            tensor[200], before = bad, memory.clone()
            frame = encode_into(codec, tensor, residual=memory, decay=0.5)
            header = headers.read_header(memoryview(frame))
            assert (header.codec, header.nonfinite) == (headers.STORED, True)
            check_same(gradwire.decode(frame), tensor)
            check_same(memory, before)


@pytest.mark.thorough
@every_recipe
def test_damage_behind_a_right_checksum_is_a_frame_error(name: str) -> None:
    frame = gradwire.codec(name).encode(gradient(400))
    header, rng = headers.read_header(memoryview(frame)), random.Random(name)
    for i in range(120):
        payload = bytearray(frame[header.length :])
        at = rng.randrange(len(payload)) if i % 2 else rng.randrange(min(16, len(payload)))
        match i % 5:
            case 0:
                del payload[at:]
            case 1:
                payload[at:at] = rng.randbytes(3)
            case _:
                payload[at] = rng.choice((payload[at] ^ 1 << rng.randrange(8), 0, 255))
        damaged = assemble(bytes(payload), header.shape, header.codec, header.dtype, header.flags)
        outcomes = []
        for backend in (BACKENDS[0], BACKENDS[-1]):
            with use_backend(backend):
                try:
                    outcomes.append(bits(gradwire.decode(damaged)))
                except FrameError:
                    outcomes.append(None)
        assert outcomes[0] == outcomes[1]


@every_recipe
def test_same_seed_same_frame(name: str) -> None:
    codec, tensor = gradwire.codec(name), gradient(900)
    frames = [codec.encode(tensor, seed=seed) for seed in (3, 3, 4, 2**64 - 1)]
    assert frames[0] == frames[1]
    assert (len(set(frames)) == 3) == codec.stochastic
    if not codec.stochastic:
        assert len(set(frames)) == 1


@every_recipe
def test_strided_tensors(name: str) -> None:
    codec, x = gradwire.codec(name), gradient(1200).reshape(40, 30)
    for view in (x.t(), x[:, ::2], x[3:5].expand(2, 2, 30), x.flip(0)):
        assert codec.encode(view) == codec.encode(view.clone(memory_format=torch.contiguous_format))


@pytest.mark.thorough
@pytest.mark.skipif(bool(os.environ.get("GRADWIRE_NO_NATIVE")), reason="takes minutes on the reference kernels")
def test_every_recipe_trains_from_the_command_line(tmp_path: Path) -> None:
    """One after the other in the same workers; the command itself compares their replicas."""
    path = tmp_path / "figures.json"
    names = [name for name in NAMES if not gradwire.recipe(name).in_adam_units]  # the command trains with SGD
    codecs = [word for name in names for word in ("--codec", name)]
    options = ["--workers", "2", "--steps", "3", "--batch-size", "16", "--threads", "1", "--json", str(path)]
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--task", "digits", *options, *codecs])
    assert exit_.value.code == 0, exit_.value.code
    runs = json.loads(path.read_text())["runs"]
    assert [run["codec"].partition(":")[0] for run in runs] == names
    for run in runs:
        assert run["steps"] == 3 and run["digest"]
        assert math.isfinite(run["history"][-1]["loss"])
    digests = {run["codec"]: run["digest"] for run in runs}
    assert digests["none"] not in (digests["co3"], digests["sbc"], digests["diloco"])
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--task", "digits", *options, "--codec", "adam"])
    assert "SGD keeps none that it knows: use structured" in str(exit_.value.code)
