"""Which client holds which training examples: evenly shuffled (IID), or skewed by class.

T.-M. H. Hsu, H. Qi, M. Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019, https://arxiv.org/abs/1909.06335, in the form that most papers since then use: the examples of
each class are divided among the clients in shares drawn from a symmetric Dirichlet distribution. The smaller its α, the
fewer clients share a class.
"""

from __future__ import annotations

import math

import numpy as np

from gradwire.errors import GradwireError
from gradwire.tasks.base import Task
from gradwire.tasks.example_order import derived_seed

STREAM = 0x5EED  # so that these draws are independent of those for the order of examples


def partition(task: Task, clients: int, seed: int, alpha: float = math.inf, at_least: int = 1) -> list[np.ndarray]:
    """Return the sorted indexes of each client's examples; every training example of the task belongs to one client.

    With α = ∞ all clients get equally many: at random if examples have classes, as contiguous parts if they have none,
    since neighbours in a text belong together. With a finite α every client gets at least `at_least` examples, or an
    even share if that is less: clients with fewer get some from those with the most.

    Raises a GradwireError that names the option if there are more clients than examples, α is not positive, or there
    are no classes to skew.
    """
    labels, size = task.train_labels(), task.train_size
    if not 1 <= clients <= size:
        raise GradwireError(f"{task.name} has {size:,} examples for training: --clients must be 1 to {size}")
    check_skew(type(task), alpha)
    if labels is None:
        return np.array_split(np.arange(size), clients)
    random = np.random.Generator(np.random.PCG64(derived_seed(seed, STREAM)))
    if alpha == math.inf:
        return [np.sort(part) for part in np.array_split(random.permutation(size), clients)]
    return _dirichlet(labels.cpu().numpy(), clients, alpha, min(at_least, size // clients), random)


def check_skew(task: type[Task], alpha: float) -> None:
    """Raise a GradwireError that names the option if classes cannot be skewed so. It needs no data."""
    if not alpha > 0:
        raise GradwireError(f"--alpha must be above 0, not {alpha}: 0.1 is much skew, 1 little; leave it out for none")
    if not task.has_classes and alpha < math.inf:
        raise GradwireError(f"--alpha skews classes, and the examples of {task.name} have none: leave it out")


def _dirichlet(
    labels: np.ndarray, clients: int, alpha: float, at_least: int, random: np.random.Generator
) -> list[np.ndarray]:
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        examples = random.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(random.dirichlet(np.full(clients, alpha))) * len(examples))
        owner[examples] = np.searchsorted(ends[:-1], np.arange(len(examples)), side="right")
    parts = [random.permutation(np.flatnonzero(owner == client)) for client in range(clients)]
    sizes = np.array([len(part) for part in parts])
    for client in np.flatnonzero(sizes < at_least):
        while (missing := at_least - sizes[client]) > 0:
            richest = int(sizes.argmax())
            count = min(missing, max(1, (sizes[richest] - at_least) // 2))
            parts[richest], moved = parts[richest][:-count], parts[richest][-count:]
            parts[client] = np.concatenate([parts[client], moved])
            sizes[richest] -= count
            sizes[client] += count
    return [np.sort(part) for part in parts]
