"""One training of benchmarks/backward_models.py: exact, or with weight gradients from some rows of a batch."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gradwire
from backward_tasks import Batch, MixerTask, TextTask

EXACT = "exact"
WARM_UP, FLOOR = 0.1, 0.1  # share of the steps in which the learning rate rises; what the cosine leaves of it


def settings(variant: str) -> dict[str, str]:
    """`POLICY,k=…,decay=…`, with `centre=no` for the paper's method, `leave=PATTERN+…` for layers that stay exact or
    `only=PATTERN+…` for the others.

    Or `exact`, or `exact,batch=…` for exact gradients of a share of each batch: that saves arithmetic, too.
    """
    policy, *given = variant.split(",")
    return {"policy": policy, **dict(part.split("=") for part in given)}


def convert(model: nn.Module, wanted: dict[str, str]) -> None:
    if wanted["policy"] == EXACT:
        return
    k = float(wanted["k"])
    if "only" in wanted:
        by_name = dict.fromkeys(wanted["only"].split("+"), k)
    else:
        by_name = {**dict.fromkeys(wanted["leave"].split("+") if "leave" in wanted else []), "*": k}
    centre = wanted.get("centre", "yes") == "yes"
    gradwire.backward.convert(model, k=by_name, policy=wanted["policy"], decay=float(wanted["decay"]), centre=centre)


class Training:
    """A model, its optimizer and its batches; equal seeds mean equal weights and batches, whatever the variant."""

    def __init__(self, task: TextTask | MixerTask, variant: str, options: argparse.Namespace, seed: int) -> None:
        self.task, self.dtype, self.steps = task, getattr(torch, options.dtype), options.steps
        self.lr = task.size.lr * options.lr_factor
        torch.manual_seed(seed)  # also what weightedk and randk draw from
        self.model = task.build_model().to(task.device)
        wanted = settings(variant)
        self.share = float(wanted.get("batch", 1))
        convert(self.model, wanted)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=True
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.taken = 0

    def autocast(self) -> Any:
        wanted = self.dtype != torch.float32
        return torch.autocast(self.task.device.type, self.dtype) if wanted else nullcontext()

    def rate(self) -> float:
        rising = max(1, round(WARM_UP * self.steps))
        along = min(1.0, max(0, self.taken - rising) / max(1, self.steps - rising))
        falling = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * along)) / 2
        return self.lr * min((self.taken + 1) / rising, falling)

    def step(self, batch: Batch | None = None) -> tuple[torch.Tensor, list[float]]:
        """The loss, and when forward began, backward began, backward ended and the step ended."""
        inputs, targets = (part[: round(self.share * len(part))] for part in batch or self.task.batch(self.generator))
        self.optimizer.param_groups[0]["lr"] = self.rate()
        times = [now(self.task.device)] if batch else []
        with self.autocast():
            loss = functional.cross_entropy(self.model(inputs).float(), targets)
        times += [now(self.task.device)] if batch else []
        loss.backward()
        times += [now(self.task.device)] if batch else []
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        times += [now(self.task.device)] if batch else []
        return loss.detach(), times

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        self.model.eval()
        losses, right = [], []
        for inputs, targets in self.task.validation():
            with self.autocast():
                logits = self.model(inputs).float()
            losses.append(float(functional.cross_entropy(logits, targets)))
            right.append(float((logits.argmax(1) == targets).float().mean()))
        self.model.train()
        return statistics.fmean(losses), statistics.fmean(right)

    def memory_mb(self) -> float:
        layers = gradwire.backward.converted(self.model).values()
        return sum(layer.memory.bytes for layer in layers if layer.memory) / 1e6


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
