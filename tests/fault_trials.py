"""Ranks that are killed or stopped in mid-step, and what the survivors say to it.

python tests/fault_trials.py --tries 20        20 kills and 20 stops, at varied moments; a table of the outcomes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.aggregate.peers import roll_call
from support.rank_pool import PRELOADED
from support.ranks import Net, loss_of
from support.torch_versions import is_from

TIMEOUT = 3.0  # seconds: the process group's
GRACE = 4.0  # seconds that survivors may need beyond it
KILL, STOP = "kill -9", "SIGSTOP"
PLACES = ("forward", "backward", "between steps", "any moment")
STORES = ("tcp", "file")  # where the ranks meet; rank 0 is the host of the first
ENDINGS = ("exit", "destroy group", "linger")  # what survivors do after the error
STEP = 3  # in which it happens: DDP has rebuilt its buckets by then


# ── the ways in which a model is wrapped ──


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, spec: str, aggregate: str) -> nn.Module:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    dist.barrier()
    gradwire.ddp.attach(wrapped, spec, optimizer=optimizer, aggregate=aggregate, timeout=TIMEOUT)
    return wrapped


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """As where `auto` has settled on plain all-reduce."""
    gradwire.ddp.State.plain = property(lambda self: True)
    group = _impatient_group()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, process_group=group)
    gradwire.ddp.attach(wrapped, "none", optimizer=optimizer)
    return wrapped


def _data_parallel(model: nn.Module, aggregate: str) -> nn.Module:
    dist.barrier()
    return gradwire.DataParallel(model, "co3", aggregate=aggregate, timeout=TIMEOUT)


def _local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, **options: int) -> nn.Module:
    options = {"sync_every": 1, **options}
    gradwire.LocalSGD(model, optimizer, "co3", **options, process_group=_impatient_group()).__enter__()
    return model


def _impatient_group() -> dist.ProcessGroup:
    """Patient while it is being made, as a busy machine takes its time for that; unless torch lets no Gloo group
    change its timeout, as 2.8."""
    later = is_from("2.13")
    group = dist.new_group(timeout=timedelta(seconds=60 if later else TIMEOUT))
    if later:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)
    dist.barrier()
    return group


WRAPPINGS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], nn.Module]] = {
    "ddp co3": lambda model, optimizer: _ddp(model, optimizer, "co3", "all_gather"),
    "ddp co3 scatter": lambda model, optimizer: _ddp(model, optimizer, "co3", "scatter_reduce"),
    "ddp sbc": lambda model, optimizer: _ddp(model, optimizer, "sbc", "all_gather"),
    "ddp all-reduce": _plain,
    "DataParallel": lambda model, _: _data_parallel(model, "all_gather"),
    "DataParallel scatter": lambda model, _: _data_parallel(model, "scatter_reduce"),
    "LocalSGD": _local_sgd,
    "LocalSGD streaming": lambda model, optimizer: _local_sgd(model, optimizer, sync_every=2, parts=2, overlap=1),
}


# ── one trial ──


@dataclass(frozen=True)
class Trial:
    fault: str
    world: int
    victim: int
    place: str
    wrapping: str = "ddp co3"
    store: str = "tcp"
    ending: str = "exit"
    unmet: bool = False  # the victim had answered nobody before, as if that had happened right after it attached


@dataclass
class Outcome:
    """Of one survivor."""

    rank: int
    kind: str  # of the error
    text: str
    seconds: float  # from the fault to the error
    ended: float  # and to the end of the process
    code: int | None  # with which that ended; None if it had to be killed

    def problem(self, trial: Trial) -> str:
        others = [r for r in range(trial.world) if r != trial.victim]
        if self.kind != "AggregateError":
            return f"raised {self.kind}"
        if f"rank {trial.victim} " not in self.text or any(f"rank {r} " in self.text for r in others):
            return "named another rank"
        if ("gone" if trial.fault == KILL else "stopped") not in self.text:
            return "named another cause"
        if self.seconds > TIMEOUT + GRACE:
            return "raised too late"
        return "" if self.code == 0 else f"ended with {self.code}"


def run(trial: Trial) -> list[Outcome]:
    """Start all ranks, wait for the survivors."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and each rank starts in no time
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = f"tcp://127.0.0.1:{_free_port()}" if trial.store == "tcp" else f"file://{folder / 'store'}"
        ranks = [context.Process(target=_rank, args=(trial, r, where, folder)) for r in range(trial.world)]
        for process in ranks:
            process.start()
        try:
            _wait(lambda: (folder / "fault").exists() or any(folder.glob("*.json")), 90)
            deadline = time.monotonic() + 2 * TIMEOUT + GRACE + 10
            ends = {}
            while len(ends) < trial.world - 1 and time.monotonic() < deadline:
                ends |= {
                    r: time.monotonic() for r, p in enumerate(ranks)
                    if r != trial.victim and r not in ends and not p.is_alive()
                }  # fmt: skip
                time.sleep(0.02)
        finally:
            late = [r for r, process in enumerate(ranks) if process.is_alive() and r != trial.victim]
            for process in ranks:
                process.kill()
                process.join()
        path = folder / "fault"
        fault = float(path.read_text()) if path.exists() else 0.0
        outcomes = []
        for rank, process in enumerate(ranks):
            path = folder / f"{rank}.json"
            said = json.loads(path.read_text()) if path.exists() else {"kind": "nothing", "text": "", "at": fault + 999}
            if rank != trial.victim:
                code = None if rank in late else process.exitcode
                ended = ends.get(rank, fault + 999) - fault
                outcomes.append(Outcome(rank, said["kind"], said["text"], said["at"] - fault, ended, code))
        return outcomes


def _rank(trial: Trial, rank: int, where: str, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if trial.unmet and rank == trial.victim:
        roll_call.answer_questions = lambda *_: None
    (folder / f"ready.{rank}").touch()
    _wait(lambda: len(list(folder.glob("ready.*"))) == trial.world, 90)  # the timeout counts from the first on
    try:
        dist.init_process_group("gloo", where, rank=rank, world_size=trial.world, timeout=timedelta(seconds=60))
        _train(trial, rank, folder)
        said = ("nothing", "")
    except Exception as error:
        said = (
            type(error).__name__,
            str(error) if isinstance(error, gradwire.GradwireError) else traceback.format_exc(),
        )
    (folder / "part").with_suffix(f".{rank}").write_text(
        json.dumps({"kind": said[0], "text": said[1], "at": time.monotonic()})
    )
    (folder / "part").with_suffix(f".{rank}").rename(folder / f"{rank}.json")
    if trial.ending == "destroy group":
        dist.destroy_process_group()
    elif trial.ending == "linger":
        time.sleep(2)


def _train(trial: Trial, rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped = WRAPPINGS[trial.wrapping](model, optimizer)
    step = -1

    def pass_by(place: str) -> None:
        if rank == trial.victim and step == STEP and place == trial.place:
            strike()

    def strike() -> None:
        (folder / "about").write_text(str(time.monotonic()))
        (folder / "about").rename(folder / "fault")
        os.kill(os.getpid(), signal.SIGKILL if trial.fault == KILL else signal.SIGSTOP)

    model.norm.register_forward_hook(lambda *_: pass_by("forward"))
    # The gradient of the first layer is the last of a backward pass: what the others sent is under way.
    model.first.weight.register_hook(lambda _: pass_by("backward"))
    began = time.monotonic()
    for step in range(STEP + 200):
        if step == STEP and rank == trial.victim and trial.place == "any moment":
            moment = random.Random(str(trial)).random() * 2 * (time.monotonic() - began) / STEP
            threading.Timer(moment, strike).start()
        pass_by("between steps")
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        optimizer.step()
    if rank == trial.victim:  # the timer has not rung yet
        time.sleep(5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened within {seconds} s")
        time.sleep(0.02)


# ── many ──


def varied(tries: int, seed: int) -> Iterator[Trial]:
    """As many kills and as many stops, spread evenly over numbers of ranks, places, wrappings, stores and endings."""
    generator = random.Random(seed)
    for fault in (KILL, STOP):
        for i in range(tries):
            world = (2, 3, 4)[i % 3]
            yield Trial(
                fault, world, generator.randrange(world), PLACES[i % len(PLACES)],
                list(WRAPPINGS)[i % len(WRAPPINGS)],
                generator.choice(STORES), generator.choice(ENDINGS),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    options = parser.parse_args()
    print(f"process groups with a timeout of {TIMEOUT:g} s; seconds from the fault to the error of the last survivor")
    print("| fault | ranks | victim | where | wrapping | store | then | error, s | end, s | outcome |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    good: dict[str, list[bool]] = {KILL: [], STOP: []}
    with ThreadPoolExecutor(options.jobs) as pool:
        trials = list(varied(options.tries, options.seed))
        for trial, outcomes in zip(trials, pool.map(run, trials), strict=True):
            problems = [f"rank {o.rank} {o.problem(trial)}: {o.text[-600:]}" for o in outcomes if o.problem(trial)]
            good[trial.fault].append(not problems)
            slowest, end = max(o.seconds for o in outcomes), max(o.ended for o in outcomes)
            print(
                f"| {trial.fault} | {trial.world} | {trial.victim} | {trial.place} | {trial.wrapping} | {trial.store} "
                f"| {trial.ending} | {slowest:.2f} | {end:.2f} | {'; '.join(problems) or 'right'} |",
                flush=True,
            )
    for fault, outcomes in good.items():
        share = f"{sum(outcomes)} of {len(outcomes)}"
        print(f"{fault}: every survivor raised AggregateError in time, naming rank and cause, in {share} tries")
    sys.exit(not all(map(all, good.values())))


if __name__ == "__main__":
    main()
