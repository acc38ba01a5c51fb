"""One rank of an attempt: it meets the others, resumes, trains, saves, and writes down what came of it."""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from gradwire.aggregate.peers.roll_call import RollCall
from soaking import saving
from soaking.faults import Fault
from soaking.training import Trainer, Training
from support.rank_pool import forget_meshes

RAISED = 3  # the exit code of a rank that has raised an error and ended by itself
COMPUTING, SAVING, ENDED = range(3)
MEETING_SECONDS = 90


class Board:
    """Memory that all ranks of an attempt share with the process that watches them: step and activity of each."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, 4096)).cast("q")

    def write(self, rank: int, step: int, activity: int) -> None:
        self._words[2 * rank], self._words[2 * rank + 1] = step, activity

    def step(self, rank: int) -> int:
        return self._words[2 * rank]

    def activity(self, rank: int) -> int:
        return self._words[2 * rank + 1]


@dataclass(frozen=True)
class Attempt:
    """What all ranks of an attempt are told."""

    training: Training
    folder: Path  # of the episode
    number: int
    resume_at: int  # a step that all ranks have saved, or 0
    mode: str  # of checkpoints
    save_every: int
    timeout: float
    fault: Fault | None
    ending: str  # what ranks do after an error: exit, or destroy group
    store: str
    aggregator: str = ""
    fallback: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def outcome(self, rank: int) -> Path:
        return self.folder / f"{self.number}.{rank}.json"

    def digests(self, rank: int) -> Path:
        return self.folder / f"{self.number}.{rank}.digests"


def live(attempt: Attempt, rank: int, board: Board) -> int:
    """The whole life of a rank; returns its exit code."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(attempt.training.threads)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"kind": "done", "text": ""}
    try:
        timeout = timedelta(seconds=MEETING_SECONDS)
        world = attempt.training.world
        dist.init_process_group("gloo", attempt.store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()
        found |= _train(attempt, rank, board)
    except Exception as error:
        found |= {"kind": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    found["at"] = time.monotonic()
    part = attempt.outcome(rank).with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(attempt.outcome(rank))
    if found["kind"] == "done":
        return 0
    if attempt.ending == "destroy group":
        dist.destroy_process_group()
    return RAISED


def _train(attempt: Attempt, rank: int, board: Board) -> dict[str, Any]:
    training, fault = attempt.training, attempt.fault
    chance = random.Random(f"{fault} {attempt.number} {rank}")
    trainer = _attached(attempt, rank)
    if attempt.resume_at:
        saving.load(attempt.checkpoints, trainer, attempt.mode, attempt.resume_at)
    trainer.begin()
    if fault is not None and fault.kind == "garbage":
        _tell_ports(attempt.folder, rank)
    refused_saves, saves = 0, trainer.step // attempt.save_every
    with open(attempt.digests(rank), "a", buffering=1) as digests:
        while trainer.step < training.steps:
            board.write(rank, trainer.step, COMPUTING)
            if fault is not None:
                fault.before_step(rank, trainer.step, chance)
            trainer.train_step()
            if attempt.number and "GRADWIRE_SOAK_SPOILED" in os.environ:  # to see that it is found
                next(trainer.module.parameters()).data.add_(1e-6)
            digests.write(f"{trainer.step} {trainer.digest()}\n")
            if trainer.step % attempt.save_every == 0 and trainer.step < training.steps:
                saves += 1
                board.write(rank, trainer.step, SAVING)
                refused_saves += _save(attempt, trainer, saves, chance)
    board.write(rank, training.steps, ENDED)
    trainer.end()
    for _ in range(2):  # each of the two files
        saves += 1
        _save(attempt, trainer, saves, None)
    found = {"digest": trainer.whole_digest(), "refused_saves": refused_saves}
    if training.conserves and (attempt.mode == saving.FILE_PER_RANK or not attempt.resume_at):
        # Of one file for all, all ranks have loaded the sums of rank 0.
        found["lost"] = trainer.lost()
    dist.barrier()  # nobody leaves while another one still needs its connections
    if hasattr(trainer.handle, "detach"):
        trainer.handle.detach()
    del trainer
    return found | _left_behind()


def _tell_ports(folder: Path, rank: int) -> None:
    """Write down where this rank answers others, for strangers to find."""
    for number, found in enumerate(o for o in gc.get_objects() if isinstance(o, RollCall)):
        if found._listener is not None:
            (folder / f"{rank}.{number}.port").write_text(str(found._listener.getsockname()[1]))


def _attached(attempt: Attempt, rank: int) -> Trainer:
    """A trainer; where one rank has another spec, all must be told, and can attach again with the right one."""
    more = (attempt.aggregator, attempt.fallback)
    if attempt.fault is not None and attempt.fault.kind == "other spec":
        other = "qsgd:levels=17" if rank == attempt.fault.victim else ""
        try:
            Trainer(attempt.training, rank, attempt.timeout, other, *more).begin()
        except gradwire.AggregateError as error:
            if f"rank {attempt.fault.victim} has spec qsgd" not in str(error):
                two = attempt.training.world == 2 and "has spec" in str(error)  # either is the odd one out
                if not two:
                    raise
        else:
            raise RuntimeError("another spec was accepted")
        gc.collect()
    return Trainer(attempt.training, rank, attempt.timeout, "", *more)


def _save(attempt: Attempt, trainer: Trainer, number: int, chance: random.Random | None) -> int:
    """Save; returns 1 if the disk was full, which must be told and must cost nothing else."""
    fault = attempt.fault
    if fault is not None and chance is not None and fault.strikes_while_saving(trainer.rank, trainer.step):
        delay = chance.random() * 0.02  # a save takes some ten milliseconds
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        saving.save(attempt.checkpoints, trainer, attempt.mode, number)
    except gradwire.CheckpointError as error:
        if fault is None or fault.kind != "full disk" or "No space left" not in str(error):
            raise
        return 1
    return 0


def _left_behind() -> dict[str, Any]:
    """What is left in a process when gradwire and the group are gone: threads, sockets and children."""
    gc.collect()
    forget_meshes()
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + 10
    while (threading.active_count() > 1 or _sockets()) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {"threads_left": names, "sockets_left": _sockets(), "children_left": len(children)}


def _sockets() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.append(target)
    return found
