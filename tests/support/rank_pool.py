"""Rank processes that are started once and serve many scenarios, one after the other.

    def nothing_is_lost(rank: int) -> None: ...    # a scenario: it runs on every rank, and checks itself there

    @pytest.mark.parametrize("scenario", named([nothing_is_lost, ...], quick={"nothing_is_lost"}))
    def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
        ranks.check(scenario)

`pytest -k nothing_is_lost` runs that scenario alone. The fixture `ranks` of conftest.py is the pool of a test session.
Ranks meet over Gloo on the loopback interface, in a process group of their own for each scenario. A scenario that
fails, kills a rank or does not end takes all of its ranks with it; the next one gets new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.catalogue import all_recipes
from support import odd_defaults

WORLD = 3
Scenario = Callable[[int], None]
# A rank is forked from a server that has imported these: torch alone takes seconds. The first is what DDP imports.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest", "gradwire"]


def named(scenarios: Iterable[Scenario] | Mapping[str, Any], quick: Iterable[str] | None = None) -> list[Any]:
    """Parameters of a test, by the scenarios' names; those that are not among the quick ones are thorough."""
    by_name = dict(scenarios) if isinstance(scenarios, Mapping) else {s.__name__: s for s in scenarios}
    chosen = set(by_name) if quick is None else set(quick)
    assert chosen <= set(by_name), chosen - set(by_name)
    return [
        pytest.param(scenario, id=name, marks=[] if name in chosen else [pytest.mark.thorough])
        for name, scenario in by_name.items()
    ]


class Rank:
    """One process of the pool, and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, other_end = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(other_end, odd_defaults.chosen))
        self.process.start()
        other_end.close()  # so that the end of the process is the end of the pipe

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class RankPool:
    """Starts ranks when they are needed, and keeps them for the next scenario."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0
        atexit.register(self.close)  # before multiprocessing waits for its children

    def check(
        self,
        scenario: Scenario,
        world: int = WORLD,
        seconds: float = 60,
        setup: Callable[[], object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run `scenario(rank)` in a process group with this timeout; fails with what went wrong on which rank."""
        self.run(partial(in_group, scenario, world, seconds, setup, environment or {}), world, 2 * seconds + 60)

    def run(
        self, work: Callable[[int, Path], object], world: int = WORLD, seconds: float = 120, folder: Path | None = None
    ) -> list[Any]:
        """What `work(rank, folder)` returned on each rank; None where it was killed by SIGKILL.

        The folder is a new one unless given, and is the ranks' working directory.
        """
        if folder is None:
            self._runs += 1
            folder = Path(self._folder.name) / str(self._runs)
            folder.mkdir()
        self._ranks = [rank for rank in self._ranks if rank.process.is_alive()]
        self._ranks += [Rank() for _ in range(world - len(self._ranks))]
        taken, self._ranks = self._ranks[:world], self._ranks[world:]
        deadline = time.monotonic() + seconds
        for number, rank in enumerate(taken):
            rank.pipe.send_bytes(pickle.dumps((sys.path, pickle.dumps((work, number, folder)))))
        outcomes: dict[int, tuple[bool, Any]] = {}
        while len(outcomes) < world and (left := deadline - time.monotonic()) > 0:
            pending = {rank.pipe: number for number, rank in enumerate(taken) if number not in outcomes}
            for pipe in wait(list(pending), left):
                assert isinstance(pipe, Connection)
                outcomes[pending[pipe]] = _received(pipe, taken[pending[pipe]].process)
        late = [number for number in range(world) if number not in outcomes]
        failures = [f"rank {number}:\n{text}" for number, (good, text) in sorted(outcomes.items()) if not good]
        if late or failures or any(not rank.process.is_alive() for rank in taken):
            for rank in taken:
                rank.end()
        else:
            self._ranks = taken + self._ranks
        for _, result in outcomes.values():
            if isinstance(result, pytest.skip.Exception):
                raise result
        if late:
            failures.append(f"ranks {late} did not end within {seconds} seconds")
        assert not failures, "\n".join(failures)
        return [outcomes[number][1] for number in range(world)]

    def outcomes(self, scenarios: Mapping[str, Callable[[int], Any]], world: int = WORLD) -> list[Outcomes]:
        """What scenarios returned, by rank and then by name. A scenario runs when it is first asked for."""

        @functools.cache
        def results(name: str) -> list[Any]:
            return self.run(partial(in_group, scenarios[name], world, 60, None, {}), world, 180)

        return [Outcomes(rank, results) for rank in range(world)]

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        self._folder.cleanup()


def _received(pipe: Connection, process: BaseProcess) -> tuple[bool, Any]:
    """Whether the work went well, and its result or what went wrong."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join()
        return process.exitcode == -signal.SIGKILL, None if process.exitcode == -signal.SIGKILL else (
            f"its process ended with {process.exitcode}"
        )


class Outcomes:
    """What scenarios returned on one rank. Each runs on all ranks when it is first asked for, and only then."""

    def __init__(self, rank: int, results: Callable[[str], list[Any]]) -> None:
        self._rank, self._results = rank, results

    def __getitem__(self, scenario: str) -> Any:
        return self._results(scenario)[self._rank]


def launch(work: Callable[[int, Path], object], folder: Path, seconds: float, world: int = WORLD) -> list[Any]:
    """`RankPool.run` with ranks that serve nobody else."""
    pool = RankPool()
    try:
        return pool.run(work, world, seconds, folder)
    finally:
        pool.close()


# ── in the ranks ──────────────────────────────────────────────────────────────────────────────────


def connect(rank: int, folder: Path, name: str, seconds: float = 60, world: int = WORLD) -> None:
    """A process group of its own for each scenario that breaks it; meeting in a file needs no free port."""
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"file://{folder / name}", rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # a rank that has met all others and leaves at once breaks it for those that have not yet


def in_group(
    scenario: Callable[[int], Any],
    world: int,
    seconds: float,
    setup: Callable[[], object] | None,
    environment: Mapping[str, str],
    rank: int,
    folder: Path,
) -> Any:
    """What the scenario returns in a process group of its own, of which nothing is left."""
    os.environ.update(environment)
    if setup is not None:
        setup()
    connect(rank, folder, "store", seconds, world)
    try:
        return scenario(rank)
    finally:
        gc.collect()  # DDP models keep the group
        forget_meshes()
        dist.destroy_process_group()


def forget_meshes() -> None:
    """torch gives sharded tensors an equal mesh that it has seen before, whose groups ended with another scenario."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:  # to torch 2.10
            from torch.distributed.tensor import DTensor

            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def _serve(pipe: Connection, defaults: str | None) -> None:
    """Work for the pool until it closes the pipe."""
    odd_defaults.choose(defaults)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: scenarios collect their garbage, and need not look through all of torch
    with contextlib.suppress(EOFError):
        while True:
            path, job = pickle.loads(pipe.recv_bytes())
            sys.path[:] = path
            with _left_as_found():
                try:
                    work, rank, folder = pickle.loads(job)
                    os.chdir(folder)
                    with odd_defaults.around_call():
                        outcome = pickle.dumps((True, work(rank, folder)))
                except pytest.skip.Exception as skipped:
                    outcome = pickle.dumps((False, skipped))
                except BaseException:
                    outcome = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(outcome)


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """Undo what scenarios change in their process: one that runs after others does the same as one that runs alone."""
    environment, folder, recipes = dict(os.environ), Path.cwd(), dict(all_recipes.CATALOGUE)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    all_recipes.CATALOGUE.clear()
    all_recipes.CATALOGUE.update(recipes)
