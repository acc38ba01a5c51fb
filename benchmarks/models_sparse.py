"""Two models whose parameters are mostly embeddings, as in the paper (arXiv 2402.07529): NCF and an LSTM of words.

Both are small enough that sending gradients over a thin link takes far longer than computing them. Batches depend on
rank and step alone, so that all contestants of benchmarks/sparse_training.py see the same ones.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from gradwire.tasks.text import Text

Batch = tuple[torch.Tensor, ...]
VALIDATION = -1  # a rank that trains nothing


class Task(Protocol):
    lr: float  # of Adagrad, which leaves rows of embeddings alone that have no gradient

    def batch(self, rank: int, step: int) -> Batch: ...

    def model(self) -> nn.Module:
        """Takes a batch, and returns its loss."""


# ── NCF ──


class Recommendation:
    """Implicit feedback of 60,000 users on 20,000 items, made up: few users and few items are in most of it, and users
    have one of 50 tastes, by which they choose. A batch is 256 of their choices, with four items each that they did
    not choose (as in NCF, arXiv 1708.05031)."""

    users, items, tastes = 60_000, 20_000, 50
    positives, negatives = 256, 4
    lr = 0.05

    def model(self) -> nn.Module:
        return NCF(self.users, self.items, width=64)

    def batch(self, rank: int, step: int) -> Batch:
        generator = _generator(rank, step)
        users = _few_often(self.users, self.positives, generator)
        items = _few_often(self.items // self.tastes, self.positives, generator) * self.tastes + users % self.tastes
        others = torch.randint(self.items, (self.positives * self.negatives,), generator=generator)
        chosen = torch.cat([torch.ones(self.positives), torch.zeros(len(others))])
        return users.repeat(1 + self.negatives), torch.cat([items, others]), chosen


class NCF(nn.Module):
    """Neural matrix factorization: an elementwise product beside an MLP, with embeddings of their own."""

    def __init__(self, users: int, items: int, width: int):
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_traits, self.item_traits = nn.Embedding(users, width), nn.Embedding(items, width)
        widths = (2 * width, width, width // 2, width // 4)
        steps = [(nn.Linear(*sizes), nn.ReLU()) for sizes in itertools.pairwise(widths)]
        self.layers = nn.Sequential(*itertools.chain(*steps))
        self.predict = nn.Linear(width + width // 4, 1)
        for table in (self.user_factors, self.item_factors, self.user_traits, self.item_traits):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        product = self.user_factors(users) * self.item_factors(items)
        traits = self.layers(torch.cat([self.user_traits(users), self.item_traits(items)], 1))
        logits = self.predict(torch.cat([product, traits], 1)).view(-1)
        return functional.binary_cross_entropy_with_logits(logits, chosen)


# ── LSTM ──


class Words:
    """The words of Python's standard library in a row: predict the next. A batch is 8 windows of 16."""

    windows, length, vocabulary = 8, 16, 20_000
    sampled = 512  # words that a target is told from, as in arXiv 1602.02410
    lr = 0.02

    def __init__(self) -> None:
        text = Text(Path())  # its data comes with Python
        words = re.findall(r"\w+|[^\w\s]", bytes(text._train.numpy().tobytes()).decode("utf-8", "replace"))
        common = [word for word, _ in Counter(words).most_common(self.vocabulary - 1)]
        numbers = {word: number for number, word in enumerate(common)}
        self.text = torch.tensor([numbers.get(word, self.vocabulary - 1) for word in words])

    def model(self) -> nn.Module:
        return WordModel(self.vocabulary, width=256)

    def batch(self, rank: int, step: int) -> Batch:
        generator = _generator(rank, step)
        last = len(self.text) - self.length - 1
        start = torch.randint(last, (self.windows, 1), generator=generator)
        window = self.text[start + torch.arange(self.length + 1)]
        others = _few_often(self.vocabulary, self.sampled, generator)
        return window[:, :-1], window[:, 1:], others


class WordModel(nn.Module):
    """Two layers of LSTM; the softmax is over the target and a sample of words."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.memory = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, text: torch.Tensor, targets: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        states = self.memory(self.embedding(text))[0].reshape(-1, self.words.embedding_dim)
        goal = targets.reshape(-1)
        own = (states * self.words(goal)).sum(1, keepdim=True)
        rivals = (states @ self.words(others).t()).masked_fill(goal[:, None] == others, float("-inf"))
        return functional.cross_entropy(torch.cat([own, rivals], 1), torch.zeros_like(goal))


def _few_often(count: int, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers below `count`, n with a chance of about 1/(n + 1)."""
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
    return ((count + 1.0) ** uniform - 1).long().clamp(max=count - 1)


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)


TASKS = {"NCF": Recommendation, "LSTM": Words}
