"""Flower rounds in which replies are lost and clients are killed: what arrived and what is left must add up."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from soaking.episode import Episode
from soaking.processes import end_all, start


def run(episode: Episode) -> None:
    rounds = episode.chance.randrange(3, 9)
    fates = [episode.chance.choice(FATES) for _ in range(rounds)]
    episode.about = f"Flower, one client, rounds: {', '.join(fates)}"
    child = start(partial(_rounds, fates, episode.folder / "memories"), episode.folder / "flower.output")
    episode.tally["hangs"] += len(end_all([child], 120))
    if child.code != 0:
        episode.wrong(f"the federation ended with {child.code}: {child.said()}")
    episode.tally["rounds"] += rounds
    episode.tally["conservations verified"] += 1
    episode.tally["replies lost"] += sum(fate != "arrives" for fate in fates)
    left = sorted(p.name for p in (episode.folder / "memories").rglob("*") if ".tmp" in p.name or ".part" in p.name)
    if left:
        episode.leak(f"files left beside the memories: {left}")


FATES = ("arrives", "arrives", "lost", "killed before", "killed after", "restarted")


def _rounds(fates: list[str], folder: Path) -> int:
    from support.flower_fates import lost_in_rounds

    folder.mkdir()
    lost = lost_in_rounds(fates, folder)
    print(f"lost {lost}")
    return 0 if lost <= 1e-5 else 1
