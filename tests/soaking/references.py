"""The runs that nothing happens to, with which all others are compared."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from soaking import attempts, plans, saving
from soaking.attempts import Verdict
from soaking.episode import Episode
from soaking.rank import Attempt
from soaking.training import Training


def undisturbed(episode: Episode, training: Training) -> dict[str, list[str]]:
    """Digests after every step, by rank, and at the "end". They are kept for other episodes with the same training."""
    name = hashlib.sha256(repr(training).encode()).hexdigest()[:24]
    kept = episode.references / f"{name}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    folder = episode.folder / "reference"
    (folder / "checkpoints").mkdir(parents=True)
    store = f"file://{folder / 'store'}"
    mode = saving.FILE_PER_RANK
    attempt = Attempt(training, folder, 0, 0, mode, training.steps, plans.PATIENT, None, "exit", store)
    verdict = attempts.run(attempt, attempts.nothing)
    take(episode, verdict)
    reference = {
        str(rank): [digest for _, digest in digests_in(attempt.digests(rank))] for rank in range(training.world)
    }
    reference["end"] = sorted({outcome.get("digest", "none") for outcome in verdict.outcomes})
    if len(reference["end"]) > 1:
        episode.wrong("replicas differ in the undisturbed run")
    if not episode.failed:
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(reference))
        part.rename(kept)
    return reference


def take(episode: Episode, verdict: Verdict) -> None:
    """Write down what an attempt has found."""
    episode.tally["hangs"] += verdict.hung
    for problem in verdict.problems:
        episode.wrong(problem)
    for outcome in verdict.outcomes:
        episode.tally["saves refused by a full disk"] += outcome.get("refused_saves", 0)
        for kind in ("threads", "sockets", "children"):
            if left := outcome.get(f"{kind}_left"):
                episode.leak(f"{kind} left at the end: {left}")


def digests_in(path: Path) -> list[tuple[int, str]]:
    """Steps and digests; a killed rank may have left half a line."""
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(step), digest) for step, digest in lines]
