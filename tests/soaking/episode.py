"""What an episode has: its own random numbers, a folder, and what it counts and finds."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path


class Episode:
    """One episode, in a process of its own. `wrong` and `leak` write down what must not be."""

    def __init__(self, number: int, seed: int, folder: Path, references: Path, alone: bool) -> None:
        self.number, self.folder, self.references, self.alone = number, folder, references, alone
        self.chance = random.Random(f"{seed} {number}")
        self.tally: Counter[str] = Counter()
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.about = ""

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    def wrong(self, text: str) -> None:
        self.tally["wrong"] += 1
        self.problems.append(text)

    def leak(self, text: str) -> None:
        self.tally["leaks"] += 1
        self.problems.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def write(self, path: Path) -> None:
        content = {"about": self.about, "tally": self.tally, "problems": self.problems, "notes": self.notes}
        path.write_text(json.dumps(content))
