"""Which examples a worker sees: a pure function of seed, epoch, step and rank.

Nothing about the order is kept between steps, so a run that resumes from a checkpoint reads exactly what
the uninterrupted run would have read.
"""

from __future__ import annotations

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """One seed from several numbers; different numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def epoch_order(train_size: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled example numbers of one epoch, the same on every worker."""
    generator = torch.Generator("cpu").manual_seed(derived_seed(seed, epoch))
    return torch.randperm(train_size, generator=generator, device="cpu")


def batch_indices(order: torch.Tensor, step: int, rank: int, workers: int, batch_size: int) -> torch.Tensor:
    """The examples of one worker's batch; `step` counts from the start of the epoch."""
    first = (step * workers + rank) * batch_size
    return order[first : first + batch_size]


def augmentation_generator(seed: int, epoch: int, step: int, rank: int) -> torch.Generator:
    """The source of randomness for one batch of one worker."""
    return torch.Generator("cpu").manual_seed(derived_seed(seed, epoch, step, rank))
