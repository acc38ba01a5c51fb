"""Replicas of torchft that are killed and started again at random moments, and what became of what they had sent.

python tests/torchft_trials.py --kills 20        three replicas, one killed with -9, twenty times; a table of the counts

Half of the kills come at any moment, half in the middle of an exchange. And now and then a replica discards a round
that the others commit, as if one had been killed while it sent: by itself that takes more luck than 20 kills have.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torchft.coordination import LighthouseServer

import gradwire
from support import torchft_replica
from support.torchft_replica import PART, PARTS, SPEC, Vote, in_its_part, integers_of, read_journal

PATIENCE = 120.0  # seconds without a round that counts, after which something hangs
PRELOADED = ["torch", "torchft", "gradwire", "gradwire.torchft", "torchft.local_sgd", "support.torchft_replica"]
LAST_STEPS = 20  # that all replicas train after the last kill


@dataclass
class Trial:
    """A training with kills: its processes, and the folder of their journals."""

    folder: Path
    replicas: int
    asynchronous: bool
    discards: float
    lighthouse: LighthouseServer = field(init=False)
    processes: list[BaseProcess] = field(default_factory=list)  # of each replica, the one that runs
    starts: list[int] = field(default_factory=list)  # of each replica, which start that is
    started: int = 0
    longest_pause: float = 0.0  # of all others, after a kill

    def __post_init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=5000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
        )
        for replica in range(self.replicas):
            self.processes.append(self.spawn(replica))
            self.starts.append(self.started - 1)

    def spawn(self, replica: int) -> BaseProcess:
        arguments = self.lighthouse.address(), replica, self.started, self.folder, self.asynchronous, self.discards
        self.started += 1
        process = self.context.Process(target=_run, args=arguments)
        process.start()
        return process

    def await_commits(self, starts: list[int]) -> None:
        """Wait until each of these starts has committed a round in which it took part."""
        before = {start: len(read_journal(self.folder, start)) for start in starts}
        deadline = time.monotonic() + PATIENCE
        waiting = set(starts)
        while waiting:
            for start in list(waiting):
                new = read_journal(self.folder, start)[before[start] :]
                if any(vote.committed and vote.takes_part for vote in new):
                    waiting.discard(start)
            self.check_alive()
            if time.monotonic() > deadline:
                raise SystemExit(f"hang: starts {sorted(waiting)} have committed nothing for {PATIENCE:g} s")
            time.sleep(0.02)

    def check_alive(self) -> None:
        for process, start in zip(self.processes, self.starts, strict=True):
            if process.exitcode is not None:
                raise SystemExit(f"start {start} ended ({process.exitcode}): see {self.folder}/output.{start}")

    def kill(self, replica: int, chance: random.Random) -> None:
        time.sleep(chance.uniform(0, 1.5))
        process = self.processes[replica]
        assert process.pid is not None
        if chance.random() < 0.5:
            (self.folder / f"kill.{self.starts[replica]}").touch()  # it kills itself, in its next exchange
        else:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed = time.monotonic()
        time.sleep(chance.choice([0.0, chance.uniform(0, 0.5), chance.uniform(1, 3)]))
        self.processes[replica] = self.spawn(replica)
        self.starts[replica] = self.started - 1
        others = [start for i, start in enumerate(self.starts) if i != replica]
        self.await_commits(others)
        self.longest_pause = max(self.longest_pause, time.monotonic() - killed)

    def finish(self) -> None:
        """Let all replicas end at the same step."""
        last = max(vote.step for start in self.starts for vote in read_journal(self.folder, start))
        (self.folder / "stop").write_text(str(last + LAST_STEPS))
        for process, start in zip(self.processes, self.starts, strict=True):
            process.join(PATIENCE)
            if process.exitcode != 0:
                raise SystemExit(f"start {start} ended badly ({process.exitcode}): see {self.folder}/output.{start}")

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.lighthouse.shutdown()


def _run(lighthouse: str, replica: int, start: int, folder: Path, *options: Any) -> None:
    output = os.open(folder / f"output.{start}", os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(output, standard)
    torchft_replica.train(lighthouse, replica, start, folder, *options)


# ── what the journals say ──


@dataclass
class Account:
    """What was found, as counts; those under `wrong` must all be zero."""

    figures: dict[str, object]
    wrong: dict[str, int]


def settle(folder: Path, starts: int, survivors: list[int]) -> Account:
    """Compare what arrived with what was computed, start by start, and the replicas with each other."""
    votes = {start: read_journal(folder, start) for start in range(starts)}
    said: dict[tuple[int, int], list[Vote]] = collections.defaultdict(list)  # by step and quorum, after the exchange
    for journal in votes.values():
        for vote in journal:
            if vote.committed is not None:
                said[vote.step, vote.quorum].append(vote)
    # A step may be committed by one that is killed before any other has its weights; it is then done again.
    counts = {step: quorum for step, quorum in sorted(said) if any(v.committed for v in said[step, quorum])}
    different = sum(len({v.digest for v in said[step, quorum] if v.committed}) > 1 for step, quorum in said)
    ends = [torch.load(folder / f"end.{start}") for start in survivors]
    different_ends = sum(not torch.equal(end["arrived"], ends[0]["arrived"]) for end in ends)
    parts_off, entries_off, memories_off, computed = 0, 0, 0, 0.0
    arrived, left_of_killed = ends[0]["arrived"], 0.0
    for start, journal in votes.items():
        begun = [vote for vote in journal if vote.committed is None and vote.takes_part]
        attempts = [vote.attempt for vote in begun if counts.get(vote.step) == vote.quorum]
        added = [integers_of(start, attempt) for attempt in attempts]
        expected, left = replay(start, added)
        off = int((expected[start] != arrived[start]).sum())
        parts_off, entries_off = parts_off + (off > 0), entries_off + off
        computed += sum(float(integers.abs().sum()) for integers in added)
        if start in survivors:
            own = ends[survivors.index(start)]
            total = sum(added, torch.zeros(PART))
            memories_off += int((arrived[start] + own["left"][start] != total).sum())
            memories_off += int((own["left"] != left).sum())
        else:
            left_of_killed += float(left.abs().sum())
    torn = [key for key, found in said.items() if len({v.committed for v in found}) > 1]
    losses = [v.loss for key in sorted(said) for v in said[key] if v.committed]
    figures = {
        "starts of a replica": starts,
        "rounds committed": len(counts),
        "rounds discarded by all": sum(not any(v.committed for v in found) for found in said.values()),
        "rounds that some committed and others not": len(torn),
        "votes": sum(map(len, said.values())),
        "computed in rounds that count (sum of magnitudes)": int(computed),
        "of that, not sent yet by those that were killed": int(left_of_killed),
        "loss, first and last 20 votes": f"{_mean(losses[:20]):.3f}, {_mean(losses[-20:]):.3f}",
    }
    wrong = {
        "rounds after which committers differ in a bit": different,
        "survivors that differ at the end": different_ends,
        "starts of which more or less arrived than was sent": parts_off,
        "integers of them that are lost or doubled": entries_off,
        "integers that survivors' memories have too many or too few": memories_off,
    }
    return Account(figures, wrong)


def replay(start: int, added: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives of these integers, in this order, and what is left of them."""
    codec = gradwire.codec(SPEC)
    arrived, memory, after = (torch.zeros(PARTS, PART) for _ in range(3))
    out = torch.empty(codec.max_frame_bytes(memory), dtype=torch.uint8)
    for integers in added:
        gradient = in_its_part(start, integers)
        length = codec.encode_into(gradient, out, residual=memory, residual_out=after, decay=1.0)
        arrived += gradwire.decode(out[:length])
        memory, after = after, memory
    return arrived, memory


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--synchronous", action="store_true", help="heal before a step, not beside it")
    parser.add_argument("--discards", type=float, default=0.01, help="share of rounds that a replica discards alone")
    parser.add_argument("--keep", type=Path, help="keep the journals in this folder")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        trial = Trial(folder, options.replicas, not options.synchronous, options.discards)
        try:
            for kill in range(options.kills):
                trial.await_commits(trial.starts)
                victim = chance.randrange(options.replicas)
                trial.kill(victim, chance)
                print(f"kill {kill + 1} of {options.kills}: replica {victim}, the others go on", flush=True)
            trial.await_commits(trial.starts)
            trial.finish()
        finally:
            trial.close()
        account = settle(folder, trial.started, trial.starts)
    print(f"\n{SPEC}, {options.replicas} replicas, {'a' if trial.asynchronous else ''}synchronous quorum, "
          f"seed {options.seed}, {time.monotonic() - began:.0f} s\n")  # fmt: skip
    rows = {"kills with -9": options.kills, **account.figures,
            "longest time until both others had committed again, in s": f"{trial.longest_pause:.1f}"}  # fmt: skip
    print("| | |\n|---|---:|")
    for name, value in {**rows, **{f"**{name}**": f"**{count}**" for name, count in account.wrong.items()}}.items():
        print(f"| {name} | {value} |")
    return int(any(account.wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
