"""The commands as users start them: `gradwire train` with checkpoints, and torchrun with restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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
        resumed = ["--resume", str(saved)] if saved.exists() else settings
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        process = _started(*resumed, *every)
        wait_for(lambda: process.poll() is not None or (saved.exists() and saved.stat().st_mtime_ns != before), 300)  # noqa: B023
        time.sleep(chance.random() * 0.3)
        if process.poll() is None:
            workers = workers_of(process)
            launcher = chance.random() < 0.4 or not workers
            os.kill(process.pid if launcher else chance.choice(list(workers.values())), signal.SIGKILL)
            episode.tally["kill"] += 1
            _, error = process.communicate(timeout=120)
            wait_for(lambda: not any(map(_runs, workers.values())), 60)  # noqa: B023
            remove_remains(episode, "gradwire-*")  # nobody is there to remove it when the launcher is killed
            if not launcher and (process.returncode != 1 or "Traceback" in error):
                episode.wrong(f"gradwire train ended with {process.returncode} after a worker was killed: {error}")
    episode.tally["restarts"] += 2
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def _ended(*arguments: str) -> tuple[int, str]:
    process = _started(*arguments)
    _, error = process.communicate(timeout=300)
    return process.returncode, error
