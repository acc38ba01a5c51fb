"""How the examples of a task are shared out among clients."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import GradwireError
from gradwire.tasks import Digits, Text
from gradwire.tasks.client_partition import partition

NOWHERE = Path("no such folder")


class Labelled(Digits):
    """A task of these labels."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels, self.train_size = torch.from_numpy(labels), len(labels)

    def train_labels(self) -> torch.Tensor:
        return self.labels


def skew(task: Digits, parts: list[np.ndarray]) -> float:
    """How far the mix of classes of a client is from that of all, in total variation; the mean over the clients."""
    labels = task.train_labels().numpy()
    overall = np.bincount(labels, minlength=10) / len(labels)
    return float(np.mean([np.abs(np.bincount(labels[p], minlength=10) / len(p) - overall).sum() / 2 for p in parts]))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=300),
    st.integers(1, 40),
    st.sampled_from([1e-6, 0.05, 0.3, 1.0, 100.0, math.inf]),
    st.integers(0, 2**63 - 1),
    st.integers(1, 20),
)
def test_every_example_belongs_to_one_client(
    labels: list[int], clients: int, alpha: float, seed: int, at_least: int
) -> None:
    task = Labelled(np.array(labels))
    clients = min(clients, len(labels))
    parts = partition(task, clients, seed, alpha, at_least)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert len(parts) == clients
    assert min(map(len, parts)) >= min(at_least, len(labels) // clients)
    again = partition(task, clients, seed, alpha, at_least)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_seeds_differ() -> None:
    task = Digits(NOWHERE)
    for alpha in (0.3, math.inf):
        one, other = partition(task, 10, 0, alpha), partition(task, 10, 1, alpha)
        assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_smaller_alpha_the_more_skew() -> None:
    task = Digits(NOWHERE)
    skews = [
        np.mean([skew(task, partition(task, 10, seed, alpha, 32)) for seed in range(5)])
        for alpha in (math.inf, 1, 0.3, 0.05)
    ]
    assert skews == sorted(skews)
    assert skews[0] < 0.15 and skews[-1] > 0.6, skews


def test_a_text_is_cut_into_contiguous_parts() -> None:
    task = Text(NOWHERE)
    parts = partition(task, 7, seed=3)
    assert np.array_equal(np.concatenate(parts), np.arange(task.train_size))
    with pytest.raises(GradwireError, match="examples of text have none: leave it out"):
        partition(task, 7, 3, 0.5)


def test_impossible_partitions_name_the_fix() -> None:
    task = Labelled(np.zeros(5, np.int64))
    with pytest.raises(GradwireError, match="--clients must be 1 to 5"):
        partition(task, 6, 0)
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(GradwireError, match="--alpha must be above 0"):
            partition(task, 2, 0, alpha)
