"""The kinds of episodes, how often each is taken, and what is checked after every one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from soaking import commands, cycles, federated
from soaking.episode import Episode
from soaking.isolation import isolate
from soaking.training_episode import TrainingEpisode

KINDS: dict[str, tuple[int, Callable[[Episode], None]]] = {  # with weights
    "training": (70, lambda episode: TrainingEpisode(episode, by_aggregator=False).run()),
    "aggregator": (18, lambda episode: TrainingEpisode(episode, by_aggregator=True).run()),
    "federated": (5, federated.run),
    "attach and detach": (4, cycles.run),
    "gradwire train": (2, commands.run_train),
    "torchrun": (1, commands.run_torchrun),
}


def run(number: int, seed: int, folder: Path, references: Path, kind: str = "") -> int:
    """Run one episode in this process, which has it as its only task; the result goes to a file."""
    os.setsid()  # so that all of its processes can be ended at once
    alone = isolate()
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    episode = Episode(number, seed, folder, references, alone)
    weights = [weight for weight, _ in KINDS.values()]
    chosen = episode.chance.choices(list(KINDS), weights)[0]
    chosen = kind or chosen  # drawn all the same, so that an episode stays as it is
    episode.about = chosen
    episode.tally["episodes"] += 1
    episode.tally[f"episodes: {chosen}"] += 1
    if not alone:
        episode.note("no network of its own: needs Linux and root; no packet loss and no full disk")
    try:
        KINDS[chosen][1](episode)
    except Exception as error:
        episode.wrong(f"the episode itself failed: {error!r}\n{traceback.format_exc()}")
    for place in (temporary, *([Path("/dev/shm")] if alone else [])):
        if left := sorted(str(path) for path in place.rglob("*")):
            episode.leak(f"files left in {place}: {left[:10]}")
    episode.write(folder / "result.json")
    return 0
