"""What a task is: data, a model and an optimizer, and the figures to report.

All tasks classify (a text is a sequence of 256-way decisions), so cross entropy is the loss everywhere.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from gradwire.errors import GradwireError

EVALUATION_BATCH = 256

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets


class DataError(GradwireError):
    """The data of a task are missing or damaged; the message says what is expected and where to get it."""


@dataclass(frozen=True)
class Defaults:
    """Hyper-parameters that train the task well; the batch size is per worker."""

    lr: float
    batch_size: int
    epochs: int


class Task(ABC):
    """One small training. Making one loads its data; the folder is ignored by tasks that need none."""

    name: ClassVar[str]
    description: ClassVar[str]
    defaults: ClassVar[Defaults]
    has_classes: ClassVar[bool] = True  # whether `train_labels` has any
    train_size: int
    test_size: int

    @abstractmethod
    def __init__(self, data_dir: Path) -> None: ...

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model; its initial parameters come from torch's global generator."""

    @abstractmethod
    def train_batch(self, indices: torch.Tensor, generator: torch.Generator) -> Batch:
        """These examples, augmented with this generator where the task augments."""

    @abstractmethod
    def test_batch(self, indices: torch.Tensor) -> Batch:
        """Held-out examples, as they are."""

    @abstractmethod
    def data_checksum(self) -> int:
        """A number that is equal on all workers when they train on the same data."""

    def train_labels(self) -> torch.Tensor | None:
        """The class of each training example, where it has one."""
        return None

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters: SGD with Nesterov momentum unless the task says otherwise."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """The figures to report, the most telling first, from the mean loss and the share that is right."""
        return {"accuracy": accuracy, "loss": loss}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; the last dimension of `logits` holds the classes."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluation_sums(task: Task, model: nn.Module, rank: int, workers: int) -> torch.Tensor:
    """[loss, right, decisions] over this worker's share of the test data, to be added up over the workers."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device="cpu")
    device = next(model.parameters()).device
    for inputs, targets in _test_batches(task, rank, workers):
        logits = model(inputs.to(device)).cpu()
        sums[0] += loss_of(logits, targets).double() * targets.numel()
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += targets.numel()
    model.train()
    return sums


def _test_batches(task: Task, rank: int, workers: int) -> Iterator[Batch]:
    share = torch.arange(task.test_size, device="cpu")[rank::workers]  # empty for a worker beyond the last example
    for start in range(0, len(share), EVALUATION_BATCH):
        yield task.test_batch(share[start : start + EVALUATION_BATCH])


def checksum(*tensors: torch.Tensor) -> int:
    """CRC-32 of the tensors' bytes."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().numpy().data, value)
    return value
