"""Trainings that end in every way, on a machine kept busy, and what their processes end with.

python tests/exit_trials.py --tries 200                  the table: ways out × wrappers, compared with plain DDP
python tests/exit_trials.py --tries 5 --way end          one way; --wrapper takes one wrapper (both can be repeated)
python tests/exit_trials.py --tries 5 --torchrun 10      then ten jobs of three ranks, as users start them

A try is a training of two ranks (--world). Ranks are forked from this process, which has imported torch and started no
thread, and end as every script does, with the end of the interpreter. Of four tries one calls
`destroy_process_group()` last, one `detach()`, one both and one neither. Beside them two processes keep the machine
busy: most of what goes wrong at exit is a race that an idle machine wins.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch._dynamo  # noqa: F401  what DDP imports: once, and not in every rank
import torch.distributed as dist

from support.exiting_ranks import (
    CTRL_C,
    END,
    EXIT_0,
    EXIT_3,
    PLAIN,
    RAISE_ALL,
    RAISE_ONE,
    READY,
    WAYS,
    WRAPPERS,
    Leaving,
    train,
)

LATE = "late"  # in place of an exit code: the rank had to be killed
# What processes end with: an exception has 1. Whether Ctrl-C or the lost connection to a rank that was faster is what
# ends a script depends on the moment; so it does with plain DDP.
EXPECTED: dict[str, set[int | str]] = {
    END: {0},
    EXIT_0: {0},
    EXIT_3: {3},
    RAISE_ALL: {1},
    RAISE_ONE: {1},
    CTRL_C: {-signal.SIGINT, 1},
}
# Plain DDP does not tell the other ranks of the exception: they wait for the timeout of the group.
EXPECTED_OF_PLAIN = EXPECTED | {RAISE_ONE: {1, LATE}}
SIGNS = ("terminate called", "Fatal Python error", "SIGABRT", "SIGSEGV")
ENDINGS = [(destroy, detach) for destroy in (False, True) for detach in (False, True)]


class Ranks:
    """The processes of one try."""

    def __init__(self, folder: Path, leaving: Leaving, pids: list[int]):
        self._folder, self._leaving, self._running = folder, leaving, dict(enumerate(pids))
        self.codes: dict[int, int | str] = {}

    def interrupt(self, seconds: float) -> None:
        """Press Ctrl-C at some moment, when all ranks train."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._running:
            if all((self._folder / f"{READY}.{rank}").exists() for rank in self._running):
                break
            self._look()
            time.sleep(0.005)
        time.sleep(random.random() * 0.05)
        for pid in self._running.values():
            os.kill(pid, signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for all of them, and kill those that are late."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            self._look()
            time.sleep(0.003)
        for rank, pid in self._running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.codes[rank] = LATE

    def _look(self) -> None:
        for rank, pid in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                del self._running[rank]

    def problems(self) -> list[str]:
        """What deviates from plain DDP: exit codes, and words on stderr that come from no user's code."""
        expected = (EXPECTED_OF_PLAIN if self._leaving.wrapper == PLAIN else EXPECTED)[self._leaving.way]
        found = [f"rank {rank} ended with {code}" for rank, code in sorted(self.codes.items()) if code not in expected]
        for rank in self.codes:
            said = (self._folder / f"stderr.{rank}").read_text(errors="replace")
            found += [f"rank {rank} said {line!r}" for line in said.splitlines() if any(s in line for s in SIGNS)]
            if self._leaving.way in (END, EXIT_0, EXIT_3) and ("Error" in said or "Exception ignored" in said):
                found.append(f"rank {rank} said {said.strip().splitlines()[-1]!r}")
        return found


def forked(leaving: Leaving, world: int, folder: Path) -> Ranks | None:
    """Fork the ranks of one try. None in a rank, after its training: it has to return to the interpreter."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            stderr = os.open(f"stderr.{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(stderr, 1)
            os.dup2(stderr, 2)
            where = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            train(leaving, rank)
            return None
        pids.append(pid)
    return Ranks(folder, leaving, pids)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep this many processors busy meanwhile."""
    owner, loops = os.getpid(), [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        if os.getpid() == owner:  # ranks come by here, too
            for loop in loops:
                loop.kill()
                loop.wait()


@dataclass
class Results:
    """Exit codes and deviations of all tries so far, by wrapper and way out."""

    total: int
    tries: dict[tuple[str, str], list[tuple[list[int | str], list[str]]]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    good: bool = True

    def add(self, leaving: Leaving, codes: list[int | str], problems: list[str]) -> None:
        """Count a try, and show what is wrong with it, or how far we are."""
        key = (leaving.wrapper, leaving.way)
        self.tries.setdefault(key, []).append((codes, problems))
        if problems:
            self.good = False
            print(f"{leaving}: {'; '.join(problems)}", flush=True)
        done = sum(map(len, self.tries.values()))
        if done % 50 == 0 or done == self.total:
            seconds = (time.monotonic() - self.began) / done
            print(f"{done} of {self.total} tries, {seconds:.2f} s each; {', '.join(key)}", flush=True)

    def table(self) -> str:
        """One line for each wrapper and way out; the last column counts the tries that deviate."""
        rows = ["| wrapper | way out | tries | exit codes of ranks | deviations |", "|---|---|---|---|---|"]
        for (wrapper, way), tries in self.tries.items():
            codes = Counter(code for codes, _ in tries for code in codes)
            shown = ", ".join(f"{code}: {count}" for code, count in codes.most_common())
            rows.append(f"| {wrapper} | {way} | {len(tries)} | {shown} | {sum(bool(p) for _, p in tries)} |")
        return "\n".join(rows)


def all_tries(options: argparse.Namespace) -> list[Leaving]:
    wrappers, ways = options.wrapper or WRAPPERS, options.way or WAYS
    endings = [ENDINGS[i % len(ENDINGS)] for i in range(options.tries)]
    return [Leaving(wrapper, way, *ending) for wrapper in wrappers for way in ways for ending in endings]


def run(options: argparse.Namespace, root: Path) -> Results | None:
    """All tries, one after the other; None in a rank."""
    random.seed(options.seed)
    tries = all_tries(options)
    results = Results(len(tries))
    with busy(options.busy):
        for leaving in tries:
            folder = Path(tempfile.mkdtemp(dir=root))
            ranks = forked(leaving, options.world, folder)
            if ranks is None:
                return None
            if leaving.way == CTRL_C:
                ranks.interrupt(options.patience)
            ranks.wait(3 if leaving.wrapper == PLAIN and leaving.way == RAISE_ONE else options.patience)
            results.add(leaving, list(ranks.codes.values()), ranks.problems())
            shutil.rmtree(folder, ignore_errors=True)
        for number in range(options.torchrun):
            ways = (END, EXIT_0, EXIT_3, RAISE_ALL)
            wrapper = "ddp.attach, 1 thread" if number % 2 else "ddp.attach, 2 threads"
            leaving = Leaving(wrapper, ways[number // 2 % len(ways)], *ENDINGS[number % len(ENDINGS)])
            code, problems = by_torchrun(leaving, 10 * options.patience)
            results.add(replace(leaving, wrapper=f"{wrapper}, torchrun"), [code], problems)
    return results


def by_torchrun(leaving: Leaving, seconds: float) -> tuple[int, list[str]]:
    """One job of three ranks: the exit code of torchrun, which is 1 if a rank has another one than 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    job = [str(Path(__file__).parent / "support" / "exiting_ranks.py"), json.dumps(asdict(leaving))]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command + job, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    expected = 0 if leaving.way in (END, EXIT_0) else 1
    problems = [] if ended.returncode == expected else [f"ended with {ended.returncode}: {ended.stderr[-2000:]}"]
    problems += [f"said {line!r}" for line in ended.stderr.splitlines() if any(s in line for s in SIGNS)]
    return ended.returncode, problems


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20, help="of each way out with each wrapper")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--wrapper", action="append", choices=list(WRAPPERS))
    parser.add_argument("--world", type=int, default=2, help="ranks of a try")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep the machine busy")
    parser.add_argument("--patience", type=float, default=30, help="seconds until a rank is late")
    parser.add_argument("--torchrun", type=int, default=0, help="jobs of torchrun, after the others")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which Ctrl-C is pressed")
    return parser.parse_args()


def main() -> None:
    options, root = parsed(), Path(tempfile.mkdtemp(prefix="exit-trials-"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored in what runs in the background
    gc.collect()
    gc.freeze()  # what was imported is shared with the ranks: they need not look through all of torch when they end
    results = run(options, root)
    if results is None:
        return  # this is a rank, and ends as every script does
    shutil.rmtree(root, ignore_errors=True)
    print(results.table())
    sys.exit(not results.good)


if __name__ == "__main__":
    main()
