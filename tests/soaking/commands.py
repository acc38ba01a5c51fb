"""The commands as users start them: `gradwire train` with checkpoints, and torchrun with restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from gradwire.checkpoints import run_file
from gradwire.tasks.digits import Digits
from soaking import elastic_script
from soaking.episode import Episode
from soaking.references import undisturbed
from support.train_runs import COMMAND, wait_for, workers_of

STEPS = 40
ELASTIC = Path(elastic_script.__file__)


def run_train(episode: Episode) -> None:
    """Killed at any moment, worker or launcher, and resumed: the same parameters as without."""
    chance, folder = episode.chance, episode.folder
    codec = chance.choice(("co3", "topk:p=0.05", "stc:p=0.05", "ecq"))
    saved = folder / "run.pt"
    settings = ["--steps", str(STEPS), "--batch-size", "8", "--codec", codec, "--threads", "1", "--timeout", "60"]
    every = ["--save", str(saved), "--save-every", "4"]
    kills = chance.choice((1, 2))
    episode.about = f"gradwire train --codec {codec}, killed {kills} times"
    expected = _digest_of(episode, settings, folder / "reference.json", f"train-{codec}")
    for _ in range(kills):
        if _is_complete(saved):
            break
        resumed = ["--resume", str(saved)] if saved.exists() else settings
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        process = _started(*resumed, *every)
        wait_for(lambda: process.poll() is not None or (saved.exists() and saved.stat().st_mtime_ns != before), 300)  # noqa: B023
        time.sleep(chance.random() * 0.3)
        _kill(episode, process, launcher=chance.random() < 0.4)
    episode.tally["restarts"] += 2
    if _is_complete(saved):  # it was killed after its last save, or not in time: nothing is left to do, and it says so
        episode.tally["runs that were over when resumed"] += 1
        code, error = _ended("--resume", str(saved), *every)
        if code != 1 or f"error: the run is at step {STEPS} already: give more --epochs or --steps" not in error:
            episode.wrong(f"gradwire train resumed a run that was over, and ended with {code}: {error}")
        episode.tally["steps verified"] += STEPS
        if _digest_in(saved) != expected:
            episode.wrong("a gradwire train that was killed after its last save has saved other parameters")
        return
    json_file = folder / "end.json"
    code, error = _ended(*(["--resume", str(saved)] if saved.exists() else settings), *every, "--json", str(json_file))
    if code != 0:
        episode.wrong(f"a resumed gradwire train ended with {code}: {error}")
        return
    episode.tally["steps verified"] += STEPS
    if json.loads(json_file.read_text())["runs"][0]["digest"] != expected:
        episode.wrong("a resumed gradwire train ended with other parameters")
    left = [path.name for path in folder.iterdir() if path.name.startswith(".run.pt")]
    if left:
        episode.leak(f"files left beside the checkpoint: {left}")


def _is_complete(saved: Path) -> bool:
    return saved.exists() and run_file.load(saved).step == STEPS


def _digest_in(saved: Path) -> str:
    model = Digits(Path()).build_model()
    model.load_state_dict(run_file.load(saved).model)
    return run_file.digest(model)


def _kill(episode: Episode, process: subprocess.Popen[str], launcher: bool) -> None:
    """Kill the launcher or one of its workers, unless that has come to its end; the rest must end as promised."""
    workers = workers_of(process) if process.poll() is None else {}
    launcher |= not workers
    victim = process.pid if launcher else episode.chance.choice(list(workers.values()))
    killed = process.returncode is None and _stops(victim)
    if killed:
        os.kill(victim, signal.SIGKILL)
        episode.tally["kill"] += 1
    _, error = process.communicate(timeout=120)
    wait_for(lambda: not any(map(_runs, workers.values())), 60)
    if launcher and killed:
        remove_remains(episode, "gradwire-*")  # nobody is there to remove it
    elif process.returncode != int(killed) or "Traceback" in error:
        how = "after a worker was killed" if killed else "by itself"
        episode.wrong(f"gradwire train ended with {process.returncode} {how}: {error}")


def _stops(pid: int) -> bool:
    """Stop a process; False if it had ended, or was about to. Without that, nobody could say what a signal has met."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _state(pid) in ("T", "Z", ""), 60)
    return _state(pid) == "T"


def run_torchrun(episode: Episode) -> None:
    """A rank that kills itself under torchrun, which is then started anew and goes on from the checkpoints."""
    chance, folder = episode.chance, episode.folder / "run"
    folder.mkdir()
    kills = sorted(chance.sample(range(4, 20), chance.choice((1, 2))))
    episode.about = f"torchrun, killed in steps {kills}"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(ELASTIC), str(folder)]
    command, killed = [sys.executable, *torchrun], ",".join(map(str, kills))
    for _ in kills:
        ended = subprocess.run([*command, killed], capture_output=True, text=True, timeout=200, check=False)
        remove_remains(episode, "torchelastic_*")  # torchrun's own
        if ended.returncode != 1 or "rank 1 is gone" not in ended.stderr:
            episode.wrong(f"torchrun ended with {ended.returncode}: {ended.stderr[-3000:]}")
            return
    ended = subprocess.run([*command, killed], capture_output=True, text=True, timeout=200, check=False)
    remove_remains(episode, "torchelastic_*")
    episode.tally["kill"] += len(kills)
    episode.tally["restarts"] += 2 * len(kills)
    if ended.returncode != 0:
        episode.wrong(f"torchrun ended with {ended.returncode}: {ended.stderr[-3000:]}")
        return
    digests = {path.read_text() for path in folder.glob("*.digest")}
    expected = undisturbed(episode, elastic_script.TRAINING)["end"]
    episode.tally["steps verified"] += 2 * elastic_script.TRAINING.steps
    if digests != set(expected):
        episode.wrong(f"under torchrun the end differs from that of the undisturbed run: {digests}")


def remove_remains(episode: Episode, pattern: str) -> None:
    """Remove what programs that were killed, or that are not gradwire's, leave in the folder for temporary files."""
    for path in (episode.folder / "tmp").glob(pattern):
        shutil.rmtree(path)


def _digest_of(episode: Episode, settings: list[str], json_file: Path, name: str) -> str:
    kept = episode.references / name
    if not kept.exists():
        code, error = _ended(*settings, "--json", str(json_file))
        if code != 0:
            raise RuntimeError(f"gradwire train ended with {code}: {error}")
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.loads(json_file.read_text())["runs"][0]["digest"])
        part.rename(kept)
    return kept.read_text()


def _runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return _state(pid) not in ("Z", "")


def _state(pid: int) -> str:
    """A letter of the kernel's: T, it is stopped; Z, it has ended and was not waited for; empty, there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def _ended(*arguments: str) -> tuple[int, str]:
    process = _started(*arguments)
    _, error = process.communicate(timeout=300)
    return process.returncode, error
