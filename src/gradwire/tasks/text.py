"""text: a byte-level language model of the source files of Python's own standard library.

The text is on every machine that runs Python. Workers on different Python versions have different texts;
the training refuses to start then.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gradwire.tasks.base import Batch, DataError, Defaults, Task, checksum

CONTEXT = 128  # bytes of text in an example
TRAIN_BYTES = 2_000_000
TEST_BYTES = 200_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text(Task):
    """A language model of bytes."""

    name = "text"
    description = "byte-level language model of Python's standard library; GRU"
    defaults = Defaults(lr=0.005, batch_size=16, epochs=1)
    has_classes = False

    def __init__(self, data_dir: Path) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        paths = _source_files(library)
        self._train = _windows([path for i, path in enumerate(paths) if i % 10], TRAIN_BYTES)
        self._test = _windows(paths[::10], TEST_BYTES)
        self.train_size, self.test_size = len(self._train), len(self._test)
        if not self.train_size or not self.test_size:
            raise DataError(f"no source files of the standard library in {library}; this task needs them")

    def build_model(self) -> nn.Module:
        """Return a new GRU."""
        return ByteModel(width=64, hidden=384)

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(model.parameters(), lr=lr)

    def train_batch(self, indices: torch.Tensor, generator: torch.Generator) -> Batch:
        """Return these windows of the training text: bytes, and the bytes that follow them."""
        return _inputs_and_targets(self._train[indices])

    def test_batch(self, indices: torch.Tensor) -> Batch:
        """Return these windows of the test text."""
        return _inputs_and_targets(self._test[indices])

    def data_checksum(self) -> int:
        """Return a checksum of both texts."""
        return checksum(self._train, self._test)

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Return the loss in nats and in bits a byte."""
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


class ByteModel(nn.Module):
    """Bytes [batch, length] to logits [batch, length, 256] for the byte that follows each."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, hidden, batch_first=True)
        self.predict = nn.Linear(hidden, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits for the byte that follows each byte."""
        states, _ = self.memory(self.embedding(text))
        logits: torch.Tensor = self.predict(states)
        return logits


def _source_files(library: Path) -> list[Path]:
    """The library's source files in an order that is the same on every machine and mixes its packages."""
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = sorted(path.as_posix() for path in paths if not SKIPPED_FOLDERS & set(path.parts))
    order = np.random.RandomState(0).permutation(len(kept))
    return [library / kept[i] for i in order]


def _windows(paths: list[Path], limit: int) -> torch.Tensor:
    """Up to `limit` bytes of the files, cut into rows of CONTEXT + 1: each byte but the first is a target."""
    pieces, total = [], 0
    for path in paths:
        pieces.append(path.read_bytes())
        total += len(pieces[-1])
        if total >= limit:
            break
    length = CONTEXT + 1
    count = min(total, limit) // length
    text = np.frombuffer(b"".join(pieces), np.uint8, count=count * length)
    return torch.from_numpy(text.reshape(count, length).copy())


def _inputs_and_targets(windows: torch.Tensor) -> Batch:
    windows = windows.long()
    return windows[:, :-1], windows[:, 1:]
