"""The settings of a federated run, which are the same on the server and on all clients."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.tasks import find
from gradwire.tasks.base import Task
from gradwire.tasks.client_partition import partition
from gradwire.tasks.images import ImageTask, LabelledImages
from gradwire.tasks.training import own_device


@dataclass(frozen=True)
class FederatedSettings:
    """What a federated run does: its task, clients, rounds and training. Equal settings give equal partitions."""

    task: str
    clients: int
    per_round: int  # clients that train in a round
    rounds: int
    local_epochs: int  # passes of a client over its examples in a round
    batch_size: int
    lr: float  # the highest; it falls to zero along half a cosine over the rounds
    seed: int
    evaluate_every: int = 1  # rounds; the last is always evaluated
    alpha: float = math.inf  # of the Dirichlet distribution of classes over clients; ∞: no skew
    data_dir: str = "data"
    device: str = "cpu"
    threads: int | None = None  # of torch, for each client
    download: str | None = None  # recipe of what the server sends
    budget: int | None = None  # bytes that a client may upload in a round
    rate: str | None = None  # how the server changes the clients' recipe over the rounds

    def shared(self) -> dict[str, Any]:
        """Return the settings that shape the outcome, for JSON, which has no infinity: `alpha` is then None."""
        values = asdict(self) | {"alpha": None if self.alpha == math.inf else self.alpha}
        return {name: value for name, value in values.items() if name not in ("data_dir", "threads")}

    def load(self) -> Task:
        """Return the task with its data, which a process loads only once."""
        return _load(self.task, self.data_dir, self.device)

    def examples_of(self, client: int) -> np.ndarray:
        """Return the indexes of a client's training examples."""
        return _parts(self)[client]


@functools.lru_cache(maxsize=1)
def _load(name: str, data_dir: str, device: str) -> Task:
    task = find(name)(Path(data_dir))
    if device != "cpu" and isinstance(task, ImageTask):  # so that batches are on the device already
        task.train = LabelledImages(*(tensor.to(own_device(device)) for tensor in task.train))
    return task


@functools.lru_cache(maxsize=4)
def _parts(settings: FederatedSettings) -> list[np.ndarray]:
    return partition(settings.load(), settings.clients, settings.seed, settings.alpha, settings.batch_size)
