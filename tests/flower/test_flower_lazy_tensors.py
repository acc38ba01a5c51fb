"""Large tensors of updates that a server decodes when a strategy asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.errors import FrameError
from gradwire.flower.server.lazy_tensors import LazyTensors
from gradwire.flower.shared import update

MODEL = {"large": torch.randn(100, 100, generator=torch.Generator().manual_seed(0)), "small": torch.zeros(10)}


def encoded(scale: float = 1.0) -> bytes:
    random = torch.Generator().manual_seed(1)
    differences = {name: scale * torch.randn(t.shape, generator=random) for name, t in MODEL.items()}
    return update.encode(differences, {}, list(MODEL), "co3").data


def test_the_same_tensors_later():
    lazy = LazyTensors()
    now = update.decode(encoded(), MODEL, deferred=lazy)
    assert list(now) == ["small"] and list(lazy.makers) == ["large"]
    assert torch.equal(lazy.makers["large"](), update.decode(encoded(), MODEL)["large"])


def test_everyone_who_asks_gets_an_array_of_his_own():
    lazy = LazyTensors()
    update.decode(encoded(), MODEL, deferred=lazy)
    make = lazy.makers["large"]
    first, wanted = make().numpy(), update.decode(encoded(), MODEL)["large"].numpy()
    part = first[3:5]
    del first
    second = make().numpy()
    part += 1  # still held: its memory is nobody else's
    third = make()
    np.testing.assert_array_equal(second, wanted)
    np.testing.assert_array_equal(third.numpy(), wanted)
    assert not np.shares_memory(second, part) and not np.shares_memory(second, third.numpy())


def test_memory_that_nobody_holds_is_used_again():
    lazy = LazyTensors()
    update.decode(encoded(), MODEL, deferred=lazy)
    make = lazy.makers["large"]
    place = make().data_ptr()
    assert make().data_ptr() == place


def test_what_would_overflow_is_rejected_at_once():
    near_the_end = {**MODEL, "large": torch.full((100, 100), 3e38)}
    update.decode(encoded(), near_the_end, deferred=LazyTensors())
    with pytest.raises(FrameError, match="infinity"):
        update.decode(encoded(scale=3e37), near_the_end, deferred=LazyTensors())
