"""Training whose gradients an aggregator adds up: real processes, UDP and Gloo over loopback, three workers."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError, GradwireError, SpecError
from gradwire.aggregate.sums import aggregator_client, aggregator_for_all_or_none
from gradwire.aggregate.sums.aggregator_client import InNetwork, Operation
from gradwire.aggregate.transport.link import Link
from gradwire.aggregator.server import Server
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, check_alike, check_raises, gathered, loss_of

WORLD = 3
KEY = "00112233445566778899aabbccddeeff"


def serve(address: str) -> None:
    ip, port = address.split(":")
    Server(UserspaceEngine((ip, int(port))), bytes.fromhex(KEY)).serve(lambda: True)


class Aggregator:
    """A process of rank 0's, at a port that all ranks know."""

    def __init__(self, rank: int):
        chosen = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        chosen.bind(("127.0.0.1", 0))
        self.rank, self.address = rank, f"127.0.0.1:{gathered(chosen.getsockname()[1])[0]}"
        chosen.close()
        self.process: multiprocessing.process.BaseProcess | None = None
        self.start()

    def start(self) -> None:
        if self.rank == 0:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["gradwire.aggregator.userspace_engine"])
            self.process = context.Process(target=serve, args=(self.address,), daemon=True)
            self.process.start()
        dist.barrier()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def steps(model: torch.nn.Module, rank: int, count: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in count:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def trained_over_gloo(spec: str, rank: int, count: range) -> str:
    torch.manual_seed(0)
    model = gradwire.DataParallel(Net(), spec)
    steps(model, rank, count)
    return check_alike(model.module)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def same_as_over_gloo(rank: int) -> None:
    with Aggregator(rank) as aggregator:
        for spec in ("homomorphic:p=0.05", "homomorphic:p=all,bits=8"):
            wanted = trained_over_gloo(spec, rank, range(8))
            torch.manual_seed(0)
            model = gradwire.DataParallel(Net(), spec, aggregator=aggregator.address)
            steps(model, rank, range(8))
            assert check_alike(model.module) == wanted, spec
            stats = model.gradwire.stats()
            assert stats["frame_bytes"] < stats["wire_bytes_sent"] < 3 * stats["frame_bytes"] + 50_000
            model.gradwire.detach()
            torch.manual_seed(0)
            wrapped = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
            handle = gradwire.ddp.attach(wrapped, spec, aggregator=aggregator.address)
            steps(wrapped, rank, range(4))
            check_alike(wrapped.module)
            handle.detach()


def a_restarted_one_goes_on(rank: int) -> None:
    wanted = trained_over_gloo("homomorphic:p=0.05", rank, range(9))
    with Aggregator(rank) as aggregator:
        torch.manual_seed(0)
        model = gradwire.DataParallel(Net(), "homomorphic:p=0.05", aggregator=aggregator.address, timeout=30)
        for part in range(3):
            if part:
                aggregator.kill()
                aggregator.start()
            steps(model, rank, range(3 * part, 3 * part + 3))
        assert check_alike(model.module) == wanted
        model.gradwire.detach()


def without_it(rank: int) -> None:
    """Nobody is there: an error that says so, or training over Gloo, as was chosen."""
    nobody = "127.0.0.1:9"
    check_raises(
        AggregateError, "could not join the aggregator",
        lambda: gradwire.DataParallel(Net(), "homomorphic", aggregator=nobody, timeout=3),
    )  # fmt: skip
    wanted = trained_over_gloo("homomorphic:p=0.05", rank, range(3))
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = gradwire.DataParallel(
            Net(), "homomorphic:p=0.05", aggregator=nobody, aggregator_fallback=True, timeout=20
        )
    assert any("going on over the process group" in str(w.message) for w in caught)
    steps(model, rank, range(3))
    assert check_alike(model.module) == wanted


def lost_in_mid_training(rank: int) -> None:
    wanted = trained_over_gloo("homomorphic:p=0.05", rank, range(6))
    with Aggregator(rank) as aggregator:
        torch.manual_seed(0)
        model = gradwire.DataParallel(
            Net(), "homomorphic:p=0.05", aggregator=aggregator.address, aggregator_fallback=True, timeout=30
        )
        steps(model, rank, range(3))
        aggregator.kill()
        dist.barrier()
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps(model, rank, range(3, 6))
        assert time.monotonic() - start < 25, "all ranks notice within ten seconds or so"
        assert check_alike(model.module) == wanted
        model.gradwire.detach()


def lost_by_some_a_step_earlier(rank: int) -> None:
    """Rank 0 still had the last sum of a step, and goes on with what is gathered in the next one."""
    served, last = InNetwork._run, 7

    def run(client: InNetwork, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
        result = served(client, operation) if client.operations <= last else None
        if result is None or (rank and client.operations == last):
            raise AggregateError("the aggregator was lost")
        return result

    spec = {"big.weight": "homomorphic:p=all", "first*": "homomorphic:p=all,bits=8", "*": "topk:p=0.1"}
    InNetwork._run = run
    try:
        with Aggregator(rank) as aggregator, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
            options = {"aggregator": aggregator.address, "aggregator_fallback": True, "timeout": 10}
            handle = gradwire.ddp.attach(wrapped, spec, **options)
            steps(wrapped, rank, range(5))
            check_alike(wrapped.module)
            handle.detach()
    finally:
        InNetwork._run = served


def lost_while_one_is_ahead_and_elsewhere(rank: int) -> None:
    """Rank 0 has the last sum and waits for the others in a collective of the training; they wait for that sum."""
    served, kept = InNetwork._run, (aggregator_client.IDLE_CHECK, aggregator_for_all_or_none.PATIENCE)
    aggregator_client.IDLE_CHECK, aggregator_for_all_or_none.PATIENCE = 0.1, 1.0
    words = torch.full((1000,), rank + 1, dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)

    def run(client: InNetwork, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
        result = served(client, operation)
        if rank and client.operations == 1:
            raise AggregateError("the aggregator was lost")
        return result

    InNetwork._run = run
    link = Link.beside(None, 20)
    try:
        with Aggregator(rank) as aggregator, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sums = aggregator_for_all_or_none.aggregator_sums(link, aggregator.address, True, 20)
            for number in range(4):
                sums.finish(sums.start(nothing, nothing))  # the aggregator counts no such sums
                ored, added = sums.finish(sums.start(words, words * number))
                assert (int(ored[0]), int(added[-1])) == (3, 6 * number)
                if number == 1:
                    aggregator.kill()
                    dist.barrier()
            sums.close()
    finally:
        InNetwork._run = served
        aggregator_client.IDLE_CHECK, aggregator_for_all_or_none.PATIENCE = kept
        link.close()


def lost_without_a_fallback(rank: int) -> None:
    with Aggregator(rank) as aggregator:
        model = gradwire.DataParallel(Net(), "homomorphic:p=0.05", aggregator=aggregator.address, timeout=4)
        steps(model, rank, range(2))
        aggregator.kill()
        dist.barrier()
        check_raises(AggregateError, "aggregator", lambda: steps(model, rank, range(2, 4)))


def another_key(rank: int) -> None:
    with Aggregator(rank) as aggregator:
        if rank == 1:
            os.environ["GRADWIRE_KEY"] = KEY[::-1]
        check_raises(
            AggregateError, "could not join the aggregator",
            lambda: gradwire.DataParallel(Net(), "homomorphic", aggregator=aggregator.address, timeout=3),
        )  # fmt: skip
        os.environ["GRADWIRE_KEY"] = KEY


def says_what_is_wrong(rank: int) -> None:
    check_raises(SpecError, "homomorphic", lambda: gradwire.DataParallel(Net(), "co3", aggregator="localhost:9"))
    check_raises(SpecError, "HOST:PORT", lambda: gradwire.DataParallel(Net(), "homomorphic", aggregator="localhost"))
    del os.environ["GRADWIRE_KEY"]
    check_raises(
        SpecError, "GRADWIRE_KEY", lambda: gradwire.DataParallel(Net(), "homomorphic", aggregator="localhost:9")
    )
    os.environ["GRADWIRE_KEY"] = KEY


def one_without_native_code(rank: int) -> None:
    """It says so itself, and the others do not wait for it."""
    kept = aggregator_client.AggregatorClient
    if rank == 1:
        aggregator_client.AggregatorClient = None
    start = time.monotonic()
    error, says = (GradwireError, "native module") if rank == 1 else (AggregateError, "could not join")
    for fallback in (False, True):
        make = partial(gradwire.DataParallel, aggregator="127.0.0.1:9", aggregator_fallback=fallback, timeout=60)
        check_raises(error, says, lambda make=make: make(Net(), "homomorphic"))
    assert time.monotonic() - start < 20, "nobody tried to join"
    aggregator_client.AggregatorClient = kept


SCENARIOS = [
    same_as_over_gloo, a_restarted_one_goes_on, without_it, lost_in_mid_training, lost_by_some_a_step_earlier,
    lost_while_one_is_ahead_and_elsewhere, lost_without_a_fallback, another_key, says_what_is_wrong,
    one_without_native_code,
]  # fmt: skip
QUICK = {
    "same_as_over_gloo", "a_restarted_one_goes_on", "another_key", "says_what_is_wrong",
    "lost_while_one_is_ahead_and_elsewhere",
}  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_training_by_aggregator(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, environment={"GRADWIRE_KEY": KEY})
