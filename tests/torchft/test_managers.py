"""gradwire's process group under torchft's own Manager: DDP, DiLoCo, LocalSGD, and replicas that are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore

pytest.importorskip("torchft", reason="torchft is not installed")

from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

import gradwire
import torchft
from gradwire.errors import GradwireError
from support.torchft_groups import EXACT, D, Integers, in_threads, left, make

TRIALS = Path(__file__).parents[1] / "torchft_trials.py"


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=20_000, quorum_tick_ms=10)
    yield server.address()
    server.shutdown()


class Replica:
    """A small network and a manager, as torchft's users have them."""

    def __init__(self, lighthouse: str, rank: int, group: Any, asynchronous: bool):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64),
                                 nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 5))  # fmt: skip
        self.rank, self.group = rank, group
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=group, load_state_dict=self.net.load_state_dict, state_dict=self.net.state_dict, min_replica_size=2,
            use_async_quorum=asynchronous, timeout=timedelta(seconds=30), rank=0, world_size=1,
            store_addr="127.0.0.1", store_port=self.store.port, replica_id=f"replica_{rank}",
            lighthouse_addr=lighthouse, hostname="localhost",
        )  # fmt: skip
        self.generator = torch.Generator().manual_seed(rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        x = torch.randn(32, 20, generator=self.generator)
        return nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))

    def close(self) -> None:
        self.manager.shutdown(wait=False)


def trained(
    lighthouse: str, train: Callable[[Replica], list[float]], asynchronous: bool = True, spec: str = "co3"
) -> tuple[list[Replica], list[list[float]]]:
    """Two replicas that were trained at the same time, and their losses."""
    with ExitStack() as stack:
        make_replicas = [lambda r=r: Replica(lighthouse, r, make(spec), asynchronous) for r in range(2)]
        replicas = in_threads(make_replicas)
        for replica in replicas:
            stack.callback(replica.close)
        losses = in_threads([lambda replica=replica: train(replica) for replica in replicas])
    return replicas, losses


def alike(replicas: list[Replica]) -> bool:
    one, other = (replica.net.state_dict() for replica in replicas)
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_ddp_exchanges_frames(lighthouse):
    def train(replica: Replica) -> list[float]:
        model = torchft.DistributedDataParallel(replica.manager, replica.net, bucket_cap_mb=0.05)
        optimizer = torchft.Optimizer(replica.manager, torch.optim.AdamW(replica.net.parameters(), 3e-3))
        losses = []
        while replica.manager.current_step() < 40:
            optimizer.zero_grad()
            loss = replica.loss(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    replicas, losses = trained(lighthouse, train)
    assert alike(replicas)
    assert all(sum(of[-5:]) < 0.7 * sum(of[:5]) for of in losses)
    assert all(5 < replica.group.stats()["ratio"] < 20 for replica in replicas)
    assert all(replica.group.state_dict()["steps"] == 40 for replica in replicas)
    assert all(len(replica.group.state_dict()["memory"]) > 1 for replica in replicas)  # several buckets


def test_diloco_has_a_memory_for_each_fragment(lighthouse):
    """The fragments are alike, so that nothing but their turn tells them apart."""

    def train(replica: Replica) -> list[float]:
        fragments = [replica.net[4], replica.net[6]]
        inner = torch.optim.AdamW(replica.net.parameters(), 3e-3)
        outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
        losses = []
        with DiLoCo(replica.manager, fragments, inner, outer, sync_every=4):
            while replica.manager.current_step() < 8:
                inner.zero_grad()
                loss = replica.loss(replica.net)
                loss.backward()
                inner.step()
                losses.append(loss.item())
        return losses

    replicas, losses = trained(lighthouse, train, asynchronous=False)
    for replica in replicas:
        assert set(replica.group.state_dict()["memory"]) == {"0.0", "1.0"}  # biases are too small to be compressed
        assert replica.group.stats()["frame_bytes"] > 0
    assert all(of[-1] < of[0] for of in losses)


def test_local_sgd_averages_parameters(lighthouse):
    def train(replica: Replica) -> list[float]:
        optimizer, losses = torch.optim.AdamW(replica.net.parameters(), 3e-3), []
        with LocalSGD(replica.manager, replica.net, optimizer, sync_every=3):
            while replica.manager.current_step() < 12:
                optimizer.zero_grad()
                loss = replica.loss(replica.net)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    replicas, losses = trained(lighthouse, train)
    assert alike(replicas)
    assert all(sum(of[-5:]) < 0.8 * sum(of[:5]) for of in losses)


def test_a_round_that_one_replica_commits_and_the_other_does_not(lighthouse):
    """Replica 1 takes the weights of replica 0, in which is what it has sent: it must not send that again."""
    arrived = [torch.zeros(D), torch.zeros(D)]
    sent: list[dict[tuple[int, int], torch.Tensor]] = [{}, {}]
    counts: set[tuple[int, int]] = set()
    decisions: list[list[bool]] = [[], []]

    def train(replica: Replica) -> list[float]:
        manager, rank, gradients = replica.manager, replica.rank, Integers(replica.rank)
        manager.register_state_dict_fn("arrived", arrived[rank].copy_, arrived[rank].clone)
        while manager.current_step() < 8:
            manager.start_quorum()
            manager.wait_quorum()
            key = manager._quorum_id, manager.current_step()
            integers = gradients.next()
            if manager.is_participating():
                sent[rank][key] = integers.clone()
            manager.allreduce(integers, reduce_op=ReduceOp.SUM).wait()
            if rank == 1 and key[1] == 3 and not any(d is False for d in decisions[1]):
                manager.report_error(RuntimeError("as if a replica had been killed before all had arrived here"))
            decisions[rank].append(manager.should_commit())
            if decisions[rank][-1]:
                arrived[rank] += integers
                if rank == 0:
                    counts.add(key)
        return []

    replicas, _ = trained(lighthouse, train, spec=EXACT)
    torn = next(i for i, committed in enumerate(decisions[1]) if not committed)
    assert decisions[0][torn] and torch.equal(arrived[0], arrived[1])
    computed = sum((g for of in sent for key, g in of.items() if key in counts), torch.zeros(D))
    assert torch.equal(arrived[0] + sum(left(replica.group) for replica in replicas), computed)


def test_an_error_of_gradwire_reaches_the_loop(lighthouse):
    """torchft notes errors and goes on, for ever, with rounds that do not count."""

    def train(replica: Replica) -> list[float]:
        manager = replica.manager
        manager.start_quorum()
        manager.allreduce(torch.ones(5000)).wait()
        assert manager.should_commit()
        manager.start_quorum()
        manager.allreduce(torch.ones(6000)).wait()
        with pytest.raises(GradwireError, match="same ones in the same order"):
            manager.should_commit()
        return []

    trained(lighthouse, train)


@pytest.mark.thorough
def test_replicas_that_are_killed_lose_and_double_nothing():
    """What python tests/torchft_trials.py does at length."""
    command = [sys.executable, str(TRIALS), "--kills", "2", "--seed", "5"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500, cwd=TRIALS.parent)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "| kills with -9 | 2 |" in result.stdout


WITHOUT_TORCHFT = """
import sys
sys.modules["torchft"] = None  # as if it were not installed
from gradwire import *
try:
    import gradwire.torchft
except ImportError as error:
    print(error)
"""


@pytest.mark.thorough
def test_without_torchft_the_error_says_how_to_install_it():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCHFT], check=False, capture_output=True, text=True)
    assert "pip install torchft" in result.stdout, result.stderr


def test_the_group_is_found_as_an_attribute_of_gradwire():
    assert gradwire.torchft.ProcessGroup.__name__ == "ProcessGroup"
