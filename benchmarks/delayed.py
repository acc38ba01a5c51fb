"""Delayed training of simulated workers: each trains for itself, and what H steps changed is averaged.

Every worker has a model and an AdamW of its own. Updates travel as real frames with error memories (`Coders`, which is
what LocalSGD has on every rank), or as a rival's own packing counts them (`delayed_rivals.py`). With `parts`, a part of
the model is exchanged at a time, and its mean arrives `overlap` steps later, as `LocalSGD(parts=…, overlap=…)` does it;
`mixed` is the α by which Streaming DiLoCo (arXiv 2501.18512) keeps the worker's own parameters then, in place of what
LocalSGD does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from delayed_rivals import SparseLoCo
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.correct.worker_memories import WorkerMemories

Tensors = dict[str, torch.Tensor]


class Exchange(Protocol):
    """What makes the mean of all workers' updates, and counts the bits that they sent together."""

    bits: float

    def average(self, updates: list[Tensors], step: int) -> Tensors: ...


class Coders:
    """The message coders of all workers, as LocalSGD has one on each rank; messages are not sent, but read at once."""

    def __init__(self, spec: str, tensors: Mapping[str, torch.Tensor], workers: int):
        self.bits = 0.0
        self.recipes = ModelRecipes(spec)
        self.recipes.know_model(tensors.items())
        self.coders = [
            MessageCoder(self.recipes, WorkerMemories(), StepLedger(), rank, workers) for rank in range(workers)
        ]

    def average(self, updates: list[Tensors], step: int) -> Tensors:
        arrived, means = [], {}
        for rank, (coder, update) in enumerate(zip(self.coders, updates, strict=True)):
            means = {name: t.cpu().contiguous() for name, t in update.items()}
            plans = self.recipes.plan_frames(whole_tensors(list(means.items())), step)
            block, length = coder.encode("sync", plans)
            arrived.append((rank, block[PREFIX : PREFIX + length].clone().numpy()))
            self.bits += 8 * length
        self.coders[-1].average(plans, arrived)
        for coder in self.coders:
            coder.memories.take_sent()
            coder.end_step()
        return {name: mean.to(updates[0][name].device) for name, mean in means.items()}


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass(frozen=True)
class Delayed:
    """One way to exchange updates."""

    spec: str = ""
    outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = plain
    parts: int = 1
    overlap: int = 0
    mixed: float | None = None
    exchange: Callable[[str, Mapping[str, torch.Tensor], int], Exchange] = field(default=Coders)


SPARSE = "sparseloco"
# Settings as the authors recommend them: DiLoCo and Streaming DiLoCo an outer Nesterov of 0.7 and 0.9, the latter 4-bit
# floats with 3 bits of exponent and α = 0.5; SparseLoCo an outer step of 1, 64 of 4096, 2 bits, memory 0.95.
ROWS = {
    "diloco bf16": Delayed("bf16", nesterov),
    "diloco 4-bit": Delayed("co3:format=e3m0b3,coder=raw,decay=0", nesterov),
    "streaming diloco 4-bit": Delayed("co3:format=e3m0b3,coder=raw,decay=0", nesterov, 3, 5, 0.5),
    "sparseloco, own packing": Delayed(exchange=lambda _, tensors, workers: SparseLoCo(tensors, workers)),
    "diloco co3": Delayed("co3", nesterov),
    "diloco structured": Delayed("structured", nesterov),
    "sparse": Delayed(SPARSE),
    "streaming diloco co3": Delayed("co3", nesterov, 3, 5),
    "streaming diloco co3, mixed": Delayed("co3", nesterov, 3, 5, 0.5),
    "streaming sparse": Delayed(SPARSE, parts=3, overlap=5),
}


def row(name: str) -> Delayed | None:
    """Return a row by its name, or of `every:SPEC`, which is averaged, `outer:SPEC` and `streaming:SPEC`; else None."""
    if name in ROWS:
        return ROWS[name]
    start, _, spec = name.partition(":")
    if start == "every":
        return Delayed(spec)
    if start == "streaming":
        return Delayed(spec, nesterov, 3, 5, 0.5)
    return Delayed(spec, nesterov) if start == "outer" else None


class DelayedWorkers:
    """Models and optimizers of all workers, and the parameters that they share."""

    def __init__(
        self, method: Delayed, model: nn.Module, workers: int, every: int,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ):  # fmt: skip
        self.method, self.every = method, every
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.optimizers = [optimizer(m) for m in self.models]
        self.common = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.outer = method.outer(list(self.common.values()))
        self.parts = split(self.common, method.parts)
        self.exchanges = [
            method.exchange(method.spec, {n: self.common[n] for n in names}, workers) for names in self.parts
        ]
        self.flight: tuple[int, list[str], list[Tensors], Tensors] | None = None

    @property
    def bits(self) -> float:
        """Bits that all workers have sent."""
        return sum(e.bits for e in self.exchanges)

    @torch.no_grad()
    def after_step(self, step: int, last: bool) -> None:
        """Exchange what is due after this step (1, 2, …)."""
        if self.flight is not None and (last or step >= self.flight[0]):
            self._arrive()
        for number, names in enumerate(self.parts):
            # Part p of P is due at its own offset in each round; at the end, all are.
            due = step % self.every == self.every * (number + 1) // len(self.parts) % self.every
            if due or last:
                self._send(step, number, names)
                if last or not self.method.overlap:
                    self._arrive()

    def _send(self, step: int, number: int, names: list[str]) -> None:
        starts = [{n: p.detach().clone() for n, p in m.named_parameters() if n in names} for m in self.models]
        updates = [{n: s[n] - self.common[n] for n in names} for s in starts]
        mean = self.exchanges[number].average(updates, step)
        self.flight = step + self.method.overlap, names, starts, mean

    def _arrive(self) -> None:
        assert self.flight is not None
        _, names, starts, mean = self.flight
        self.flight = None
        for name in names:
            self.common[name].grad = -mean[name]
        self.outer.step()
        for name in names:
            self.common[name].grad = None
        for model, start in zip(self.models, starts, strict=True):
            for name, p in model.named_parameters():
                if name in names and self.method.mixed is not None:
                    p.copy_(self.method.mixed * p + (1 - self.method.mixed) * self.common[name])
                elif name in names:
                    p.copy_(self.common[name] + (p - start[name]))


def split(tensors: Mapping[str, torch.Tensor], parts: int) -> list[list[str]]:
    """Return the names in contiguous parts with about as many entries each, as LocalSGD divides a model."""
    total, found, at = sum(t.numel() for t in tensors.values()), [[] for _ in range(parts)], 0
    for name, tensor in tensors.items():
        found[min(parts - 1, parts * (at + tensor.numel() // 2) // total)].append(name)
        at += tensor.numel()
    return [names for names in found if names]
