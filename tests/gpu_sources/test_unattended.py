"""Messages between GPUs that nobody waits for: two real ranks, with the GPU's kernels on the CPU.

What is the same as with messages that are waited for is tested in test_messages_on_device.py. Here is what differs:
messages that have to wait, and what the host learns later than it did.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.aggregate.transport import message_prefix
from gradwire.aggregate.transport.message_prefix import Subject
from gradwire.errors import AggregateError, GradwireError
from gradwire.gpu import Outcome
from gradwire.gpu import unattended as gpu_unattended
from support.counted_launches import on_device
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, Tensors, digest, gathered, loss_of

patched = patch.object
WORLD, ENTRIES, OTHERS = 2, 20_000, 300


class Vectors(nn.Module):
    """Two parameters whose gradients are what `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(ENTRIES)), nn.Parameter(torch.zeros(OTHERS))

    def forward(self, large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        return (self.large * large).sum() + (self.small * small).sum()


class Training:
    """A training of which every gradient is known."""

    def __init__(self, rank: int, spec: str = "co3:decay=1", memory: str = "fp32"):
        self.model = DistributedDataParallel(Vectors())
        self.handle = gradwire.ddp.attach(self.model, spec, aggregate="all_gather", memory=memory, timeout=10)
        self.generator = torch.Generator().manual_seed(rank)

    def step(self, share: float = 1.0, small: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradient of this rank, and the means of both parameters.

        A share of the large gradient is not zero; the small one is there, or zero.
        """
        large = torch.randn(ENTRIES, generator=self.generator)
        large *= torch.rand(ENTRIES, generator=self.generator) < share
        self.model.zero_grad()
        self.model(large, torch.randn(OTHERS, generator=self.generator) * small).backward()
        means = [p.grad.clone() for p in self.model.module.parameters() if p.grad is not None]
        return large, means[0], means[1]

    def memory(self, name: str = "large") -> torch.Tensor:
        memory: torch.Tensor = self.handle.state_dict()["memory"][name]
        return memory.clone()


@contextmanager
def trained(rank: int, spec: str = "co3:decay=1", memory: str = "fp32") -> Iterator[tuple[Training, Counter[str]]]:
    with on_device() as launches:
        training = Training(rank, spec, memory)
        yield training, launches
        training.handle.detach()


def mean_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    rows: list[torch.Tensor] = [row.double() for row in gathered(tensor) if isinstance(row, torch.Tensor)]
    return torch.stack(rows).mean(0)


def trained_net(rank: int, spec: str, attended: bool) -> tuple[Tensors, int]:
    """Parameters after some steps with momentum; where unused parameters are looked for, messages are waited for."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=attended)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    with on_device() as launches:
        gradwire.ddp.attach(model, spec, optimizer=optimizer, aggregate="all_gather")
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}, launches["conclude"]


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def same_as_attended(rank: int, spec: str) -> None:
    """Whether anybody waits makes no difference to a bit, with or without momentum before the exchange."""
    expected, none = trained_net(rank, spec, attended=True)
    found, some = trained_net(rank, spec, attended=False)
    assert none == 0 < some
    assert digest(found) == digest(expected)
    assert len(set(gathered(digest(found)))) == 1


def what_does_not_fit_waits(rank: int) -> None:
    """One rank's message outgrows its room: no mean on either rank, and nothing is lost."""
    with trained(rank) as (training, launches):
        wanted, sent, waited = torch.zeros(ENTRIES).double(), torch.zeros(ENTRIES).double(), []
        for step in range(8):
            before = training.memory() if step else torch.zeros(ENTRIES)
            large, mean, small = training.step(share=1.0 if step >= 4 and rank == 1 else 0.01)
            wanted, sent = wanted + large.double(), sent + mean.double()
            waited.append(not mean.any())
            if waited[-1]:
                assert not small.any()  # the whole message
                assert torch.equal(training.memory(), large + before)
        assert waited == [False] * 4 + [True] + [False] * 3  # its room was made at once
        assert gathered(waited) == [waited] * WORLD
        assert launches["conclude"]
        left = mean_of_ranks(wanted) - mean_of_ranks(training.memory())
        torch.testing.assert_close(sent, left, rtol=1e-5, atol=1e-5)


def an_absent_gradient_leaves_its_memory(rank: int) -> None:
    with trained(rank) as (training, launches):
        for _ in range(4):
            training.step()
        memory, before = training.memory("small"), launches["conclude"]
        assert memory.any()
        _, _, mean = training.step(small=rank == 0)
        assert launches["conclude"] > before
        assert torch.equal(training.memory("small"), memory) == (rank == 1)
        assert mean.any()  # the other rank has one
        memory = training.memory("small")
        _, _, mean = training.step(small=False)
        assert torch.equal(training.memory("small"), memory)
        assert not mean.any()


def a_rank_out_of_step_is_an_error(rank: int) -> None:
    """The mean is zero, which does no harm, and the next look at the training raises the error."""
    with on_device():
        training = Training(rank)
        for _ in range(3):
            training.step()
        with patched(Subject, "stamp", property(lambda self: self.step + 7)) if rank == 1 else nullcontext():
            _, mean, _ = training.step()
        assert not mean.any()
        with pytest.raises(AggregateError, match="is at step"):
            training.handle.stats()
        with pytest.raises(AggregateError, match="failed before"):
            training.step()


def one_rank_logs(rank: int) -> None:
    """Errors are measured where they are asked for, and the other rank does not notice."""
    figures: list[dict[str, float]] = []
    with trained(rank) as (training, launches):
        if rank == 0:
            training.handle.log_to(lambda found, step: figures.append(found), every=2, layers=True)
        for _ in range(6):
            training.step()
        assert launches["conclude"]
    if rank == 0:
        attended, *others = figures
        assert len(others) == 2
        for found in others:
            for name in ("nmse", "frame_bytes/large", "frame_bytes/small"):
                assert attended[name] / 2 < found[name] < 2 * attended[name], (name, attended, found)


def what_is_unusual_is_waited_for(rank: int) -> None:
    """Frames that the kernels leave to the host: the means come a step later, by the host."""
    with trained(rank, "ecq:decay=1") as (training, launches):
        sent, wanted = torch.zeros(ENTRIES).double(), torch.zeros(ENTRIES).double()
        launched = []
        for step in range(7):
            before = launches["conclude"]
            with patched(Outcome, "waited", property(lambda self: True)) if step == 3 else nullcontext():
                large, mean, _ = training.step()
                training.handle.stats()
            launched.append(launches["conclude"] > before)
            wanted, sent = wanted + large.double(), sent + mean.double()
        assert launched[-5:] == [True, True, False, True, True]
        left = mean_of_ranks(wanted) - mean_of_ranks(training.memory())
        torch.testing.assert_close(sent, left, rtol=1e-4, atol=1e-4)


def narrow_memory_is_waited_for(rank: int) -> None:
    with trained(rank, memory="bf16") as (training, launches):
        for _ in range(5):
            training.step()
        assert not launches["conclude"] and launches["encode_chunks"]


def narrow_memory_of_one_rank_is_waited_for_by_all(rank: int) -> None:
    with trained(rank, memory="bf16" if rank == 0 else "fp32") as (training, launches):
        for _ in range(4):
            _, mean, _ = training.step()
        assert not launches["conclude"]
        assert len(set(gathered(digest({"mean": mean})))) == 1


def a_rare_gradient_arrives(rank: int) -> None:
    """What has waited is sent by the next message, though its tensor has no gradient any more; nor is room wasted."""
    with trained(rank) as (training, launches):
        sent, wanted, waited = torch.zeros(ENTRIES).double(), torch.zeros(ENTRIES).double(), 0
        for step in range(26):
            before = training.handle.stats()["wire_bytes_sent"]
            large, mean, small = training.step(share=float(step % 10 == 5))
            assert training.handle.stats()["wire_bytes_sent"] - before < 4 * ENTRIES
            waited += not small.any()
            wanted, sent = wanted + large.double(), sent + mean.double()
        assert waited == 3 and launches["conclude"]
        training.step(share=0)
        sent += training.model.module.large.grad.double()
        assert training.memory().norm() < wanted.norm() / 5
        left = mean_of_ranks(wanted) - mean_of_ranks(training.memory())
        torch.testing.assert_close(sent, left, rtol=1e-5, atol=1e-5)


def a_failure_in_the_next_step_does_not_undo_the_last(rank: int) -> None:
    """The host learns late how a step went, when the next one has failed already."""
    with on_device() as launches, patched(torch, "get_num_threads", lambda: 2):  # so that there is an exchange thread
        training = Training(rank)
        for _ in range(3):
            training.step()
        before, wait = training.memory(), Outcome.wait

        def late(report: Outcome) -> None:
            time.sleep(0.5)
            wait(report)

        with patched(Outcome, "wait", late):
            large, mean, _ = training.step()
            failing = patched(training.handle.state, "_named", side_effect=GradwireError("fails"))
            with failing, pytest.raises(GradwireError, match="fails"):
                training.step()
        assert launches["conclude"]
        left = mean_of_ranks(large + before) - mean_of_ranks(training.memory())
        torch.testing.assert_close(mean.double(), left, rtol=1e-5, atol=1e-5)


def a_lost_rank_is_an_error(rank: int) -> None:
    with on_device() as launches:
        training = Training(rank)
        for _ in range(3):
            training.step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert launches["conclude"]
        with pytest.raises(AggregateError, match="rank 1 is gone"):
            training.step()


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        what_does_not_fit_waits, an_absent_gradient_leaves_its_memory, a_rank_out_of_step_is_an_error, one_rank_logs,
        what_is_unusual_is_waited_for, narrow_memory_is_waited_for, narrow_memory_of_one_rank_is_waited_for_by_all,
        a_rare_gradient_arrives, a_failure_in_the_next_step_does_not_undo_the_last, a_lost_rank_is_an_error,
    )
}  # fmt: skip


SPECS = ("co3", "ecq", "topk:p=0.1", "sbc:p=0.1", "stc:p=0.1,mask=off", "signsgd:decay=0.9")
SCENARIOS |= {spec: partial(same_as_attended, spec=spec) for spec in SPECS}


QUICK = {*SCENARIOS} - {"ecq", "topk:p=0.1", "stc:p=0.1,mask=off", "signsgd:decay=0.9", "what_is_unusual_is_waited_for"}


def test_prefixes_are_as_long_as_those_of_the_transport() -> None:
    assert gpu_unattended.PREFIX == message_prefix.PREFIX


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_unattended(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
