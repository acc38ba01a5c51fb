"""--defaults: what gradwire sees of torch's defaults, and what a test sees, in this process and on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gradwire
from support import odd_defaults
from support.rank_pool import RankPool

ORDINARY = {"dtype": torch.float32, "device": "cpu", "deterministic": False, "inference": False, "threads": 1}
ODD: dict[str | None, dict[str, Any]] = {
    None: {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "device": {"device": "meta"},
    "deterministic": {"deterministic": True},
    "inference": {"inference": True},
    "threads": {"threads": odd_defaults.ODD_THREADS},
}


def defaults() -> dict[str, Any]:
    made = torch.empty(1)
    return {
        "dtype": made.dtype,
        "device": made.device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
    }


class Converter:
    """Says what it sees of the defaults when a codec asks for its property."""

    @property
    def stochastic(self) -> dict[str, Any]:
        return defaults()


def within_and_without(rank: int = 0, folder: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
    return gradwire.Codec("seen", Converter()).stochastic, defaults()


def test_defaults_are_as_chosen() -> None:
    within, without = within_and_without()
    assert within == ORDINARY | ODD[odd_defaults.chosen]
    assert without == (within if odd_defaults.chosen in odd_defaults.WHOLE_CALLS else ORDINARY)


def test_ranks_have_them_too(ranks: RankPool) -> None:
    assert ranks.run(within_and_without, 2) == 2 * [within_and_without()]


def test_every_default_is_known() -> None:
    assert set(ODD) == {None, *odd_defaults.NAMES}


def test_a_default_that_two_threads_share_ends_with_the_last() -> None:
    events = []

    @contextmanager
    def setting() -> Iterator[None]:
        events.append("set")
        yield
        events.append("set back")

    shared = odd_defaults.Shared(setting)
    first, second = shared(), shared()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert events == ["set"]
    second.__exit__(None, None, None)
    assert events == ["set", "set back"]


def test_a_backward_pass_in_inference_mode_is_a_skip() -> None:
    weight = torch.ones(3, requires_grad=True)
    with odd_defaults.inference(), pytest.raises(pytest.skip.Exception):
        weight.sum().backward()
