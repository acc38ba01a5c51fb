"""The soak: training after training, with kills, stops, restarts, full disks, lost packets and jumping clocks.

python tests/soak.py --minutes 60 --seed 0         an hour of episodes at random; a table at the end
python tests/soak.py --seed 0 --episode 17         one episode again, as it was; --keep leaves its folder
python tests/soak.py --seed 0 --episodes 20        the first twenty
python tests/soak.py --kind federated --minutes 1  one kind of them

Every episode runs in processes of its own, over real sockets; soaking/episodes.py has the kinds, and soaking/faults.py
what happens. The exit code is 1 if anything was wrong, hung or leaked.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin for work take the cores from other ranks

import torch._dynamo  # noqa: F401 (what DDP imports when it is first used)

import gradwire.flower.one_process  # noqa: F401
from soaking import episodes
from soaking.processes import Child, run_program, start

PR_SET_CHILD_SUBREAPER = 36
EPISODE_SECONDS = 600  # that no episode needs
LISTED = ("wrong", "hangs", "leaks")


class Soak:
    """Runs episodes, some at a time, and adds up what they counted."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.tally: Counter[str] = Counter(dict.fromkeys(LISTED, 0))
        self.problems: list[dict[str, object]] = []
        self.notes: Counter[str] = Counter()
        self.running: dict[int, tuple[Child, float]] = {}  # by number of the episode
        self.began = time.monotonic()
        (folder / "references").mkdir()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of episodes become visible children

    def run(self) -> None:
        numbers = self._numbers()
        more = True
        try:
            while more or self.running:
                while more and len(self.running) < self.options.jobs:
                    number = next(numbers, None)
                    more = number is not None
                    if number is not None:
                        self._start(number)
                self._collect()
                self._show()
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            for number, (child, _) in list(self.running.items()):
                child.signal(signal.SIGKILL)
                while child.poll() is None:
                    time.sleep(0.01)
                self._end(number)

    def _numbers(self):  # type: ignore[no-untyped-def]
        if self.options.episode is not None:
            return iter(self.options.episode)
        if self.options.episodes is not None:
            return iter(range(self.options.episodes))
        until = self.began + 60 * self.options.minutes
        return itertools.takewhile(lambda _: time.monotonic() < until, itertools.count())

    def _start(self, number: int) -> None:
        folder = self.folder / str(number)
        folder.mkdir()
        work = partial(episodes.run, number, self.options.seed, folder, self.folder / "references", self.options.kind)
        self.running[number] = start(work, folder / "episode.output"), time.monotonic()

    def _collect(self) -> None:
        for number, (child, began) in list(self.running.items()):
            if child.poll() is None:
                if time.monotonic() - began > EPISODE_SECONDS:
                    self.tally["hangs"] += 1
                    self.tally["episodes"] += 1
                    child.signal(signal.SIGUSR1)
                    time.sleep(0.5)
                    self._problem(number, "the episode did not end", child)
                    child.signal(signal.SIGKILL)
                    while child.poll() is None:
                        time.sleep(0.01)
                    self._end(number)
                continue
            self._take(number, child)
            self._end(number)

    def _take(self, number: int, child: Child) -> None:
        path = self.folder / str(number) / "result.json"
        if child.code != 0 or not path.exists():
            self.tally["wrong"] += 1
            self._problem(number, f"its process ended with {child.code}", child)
            return
        result = json.loads(path.read_text())
        self.tally.update(result["tally"])
        self.notes.update(set(result["notes"]))
        for problem in result["problems"]:
            self._problem(number, f"{result['about']}\n{problem}", None)
        if self.options.verbose:
            print(f"\r\033[Kepisode {number}, {time.monotonic() - self.running[number][1]:.1f} s: {result['about']}")

    def _problem(self, number: int, text: str, child: Child | None) -> None:
        text += "\n" + child.said() if child is not None else ""
        self.problems.append({"episode": number, "text": text})
        print(f"\r\033[Kepisode {number}: {text}", flush=True)

    def _end(self, number: int) -> None:
        """Nothing of an episode is left: what still runs is ended, and counted, if the episode had come to its end."""
        child, _ = self.running.pop(number)
        failed = any(problem["episode"] == number for problem in self.problems)
        left = orphans_of(child.pid)
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if left and not failed:
            self.tally["leaks"] += len(left)
            self._problem(number, f"processes left: {left}", None)
        if not self.options.keep and not failed and not left:
            shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def _show(self) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{self._line()}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - getattr(self, "shown", self.began) > 60:
            self.shown = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self.began
        names = ("episodes", "kill", "stop", "restarts", "steps verified", *LISTED)
        return f"{seconds / 60:.1f} min: " + ", ".join(f"{self.tally[name]:,} {name}" for name in names)

    def report(self) -> int:
        print(f"\n\n| {'counted':32s} | {'number':>9s} |\n|{'-' * 34}|{'-' * 10}:|")
        for name, count in [*sorted((n, c) for n, c in self.tally.items() if n not in LISTED)]:
            print(f"| {name:32s} | {count:9,d} |")
        for name in LISTED:
            print(f"| {name:32s} | {self.tally[name]:9,d} |")
        print(f"{(time.monotonic() - self.began) / 60:.1f} minutes, seed {self.options.seed}")
        for note, count in self.notes.items():
            print(f"{count} episodes: {note}")
        if self.options.json:
            content = {"seed": self.options.seed, "minutes": (time.monotonic() - self.began) / 60,
                       "counts": dict(self.tally), "problems": self.problems, "notes": dict(self.notes)}  # fmt: skip
            self.options.json.write_text(json.dumps(content, indent=1) + "\n")
        return int(any(self.tally[name] for name in LISTED) or bool(self.problems))


def orphans_of(session: int) -> list[int]:
    """Processes of an episode's session that still run, which this process has inherited."""
    found = []
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        with suppress(ProcessLookupError, ChildProcessError):
            if os.getsid(pid) == session and os.waitpid(pid, os.WNOHANG) == (0, 0):
                found.append(pid)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, action="append", metavar="K", help="only this one; may be given again")
    parser.add_argument("--episodes", type=int, metavar="N", help="the first N, however long they take")
    parser.add_argument("--kind", default="", choices=["", *episodes.KINDS])
    parser.add_argument("--jobs", type=int, default=2, help="episodes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all episodes, not only of failed ones")
    parser.add_argument("--verbose", action="store_true", help="a line for each episode")
    options = parser.parse_args()
    gc.freeze()  # children need not look through all of torch when they collect their garbage, or end
    folder = Path(tempfile.mkdtemp(prefix="gradwire-soak-"))
    soak = Soak(options, folder)
    soak.run()
    code = soak.report()
    if options.keep or soak.problems:
        print(f"folders of episodes: {folder}")
    else:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(run_program(main))
