"""What a run is asked to do, the same on every worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# What shapes a run: all workers must agree on it, and a checkpoint carries it.
SHARED = ("task", "codecs", "seed", "batch_size", "lr", "epochs", "steps", "sync_every", "aggregate", "backward")


@dataclass(frozen=True)
class Settings:
    """The options of `gradwire train` after they were checked."""

    task: str
    codecs: tuple[str, ...]  # one run each, one after the other, with each of `backward`
    seed: int
    batch_size: int  # per worker
    lr: float
    epochs: int | None  # either this
    steps: int | None  # or this ends the run
    data_dir: str
    timeout: float  # seconds that a collective may take
    sync_every: int | None = None  # local steps between syncs; by default the recipe's own
    device: str = "cpu"
    aggregate: str = "all_gather"  # "auto" goes by the clock, and two runs would not be the same to the bit
    aggregator: str | None = None  # host:port of what sums the gradients of recipes that can be summed
    aggregator_fallback: bool = False
    backward: tuple[str, ...] = ("none",)  # rows that weight gradients are made of (backward.py)
    threads: int | None = None
    json: str | None = None
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None

    def shared(self) -> dict[str, Any]:
        """Return the settings that all workers must agree on."""
        values = asdict(self)
        return {name: values[name] for name in SHARED}

    def to_json(self) -> str:
        """Write all settings, for the command line of a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("codecs", "backward")})
