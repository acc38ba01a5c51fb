"""Parameters as differences to a mean that replicas share, for torchft's LocalSGD."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed")

from gradwire.torchft import ProcessGroup
from support.torchft_groups import EXACT, D, Quorums, add_up, make, vote


def replicas(count: int, spec: str = "co3") -> list[ProcessGroup]:
    groups = [make(spec) for _ in range(count)]
    for group in groups:
        group.expect_parameters()
    return groups


def drifted(parameters: torch.Tensor, count: int, seed: int) -> list[torch.Tensor]:
    """What the parameters of each replica have become after some steps of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [parameters + 0.01 * torch.randn(D, generator=generator) for _ in range(count)]


def test_the_first_mean_is_exact_and_later_ones_as_close_as_their_changes():
    groups, parameters = replicas(3), torch.randn(D, generator=torch.Generator().manual_seed(9))
    Quorums().form(groups)
    for step in range(4):
        own = drifted(parameters, 3, step)
        true = sum(own) / 3
        add_up(groups, own)
        assert all(torch.equal(tensor, own[0]) for tensor in own)
        error = (own[0] / 3 - true).norm()
        assert error < 1e-5 * true.norm() if step == 0 else error < 0.5 * (true - parameters).norm()
        vote(groups)
        parameters = own[0] / 3
    assert groups[0].stats()["frame_bytes"] < 4 * D + 3 * D


def test_what_is_left_of_the_differences_arrives_in_full_when_replicas_change():
    quorums, groups = Quorums(), replicas(2, EXACT)
    quorums.form(groups)
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(-50, 51, (D,), generator=generator).float() * 2
    own = [start.clone(), start.clone()]
    add_up(groups, own)
    vote(groups)
    change = [torch.randint(-5, 6, (D,), generator=generator).float() for _ in range(2)]
    own = [start + c for c in change]
    add_up(groups, own)
    vote(groups)
    reached = own[0]
    missing = 2 * start + change[0] + change[1] - reached
    assert missing.any()
    quorums.form(groups)
    again = [reached / 2, reached / 2]
    add_up(groups, again)
    vote(groups)
    assert torch.equal(again[0], reached + missing)
    assert not any(memory.any() for group in groups for memory in group.state_dict()["memory"].values())


def test_a_replica_that_heals_counts_for_nothing():
    groups, parameters = replicas(3), torch.randn(D, generator=torch.Generator().manual_seed(1))
    Quorums().form(groups)
    for step in range(2):
        own = drifted(parameters, 2, step)
        true = sum(own) / 2
        tensors = [own[0], torch.zeros(D), own[1]]
        add_up(groups, tensors)
        assert (tensors[1] / 2 - true).norm() < 0.01 * true.norm()
        vote(groups)
        parameters = tensors[0] / 2


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_parameters_that_do_not_change_stay_what_they_are(value):
    groups = replicas(2)
    Quorums().form(groups)
    for _ in range(3):
        own = [torch.full((D,), value), torch.full((D,), value)]
        add_up(groups, own)
        vote(groups)
        assert torch.equal(own[0], torch.full((D,), 2 * value))


def test_a_discarded_round_shares_nothing():
    quorums, groups, parameters = Quorums(), replicas(2), torch.ones(D)
    quorums.form(groups)
    for committed in (True, False, True, True):
        own = drifted(parameters, 2, 0)
        true = sum(own) / 2
        add_up(groups, own)
        assert torch.equal(own[0], own[1])
        assert (own[0] / 2 - true).norm() < 0.01 * true.norm()
        vote(groups, committed)
        if not committed:
            quorums.form(groups)
