"""Rivals of delayed exchange, from the facts of their papers, with the bits that their own packing takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
CHUNK, KEPT, DECAY = 4096, 64, 0.95
VALUE_BITS, RANGE = 2, 6.0  # the four levels divide six standard deviations
LEVEL_BITS = 32


class SparseLoCo:
    """SparseLoCo (arXiv 2508.15706): of every 4096 entries the 64 largest, with 2 bits each.

    e ← 0.95·e + Δ; what is sent leaves the memory e. A position takes 12 bits. A value is one of four: the values of a
    tensor are divided evenly over six standard deviations around their mean, and each of the four cells stands for the
    mean of the values in it; these four travel as fp32. Tensors of fewer entries are one chunk, whose positions take
    fewer bits, and none where all are sent.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], workers: int):
        self.bits = 0.0
        self.memories: list[Tensors] = [{n: torch.zeros_like(t) for n, t in tensors.items()} for _ in range(workers)]

    def average(self, updates: list[Tensors], step: int) -> Tensors:
        mean: Tensors = {}
        for memory, update in zip(self.memories, updates, strict=True):
            for name, change in update.items():
                memory[name].mul_(DECAY).add_(change)
                sent = self._compressed(memory[name])
                memory[name].sub_(sent)
                mean[name] = sent / len(updates) + mean[name] if name in mean else sent / len(updates)
        return mean

    def _compressed(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.flatten()
        chunk = min(CHUNK, len(flat))
        chunks = functional.pad(flat, (0, -len(flat) % chunk)).view(-1, chunk)
        kept = chunks.abs().topk(min(KEPT, chunk), dim=1).indices
        values = chunks.gather(1, kept)
        index_bits = math.ceil(math.log2(chunk)) if chunk > KEPT else 0
        self.bits += values.numel() * (index_bits + VALUE_BITS) + LEVEL_BITS * 2**VALUE_BITS
        sent = torch.zeros_like(chunks).scatter_(1, kept, quantized(values))
        return sent.flatten()[: len(flat)].view_as(tensor)


def quantized(values: torch.Tensor) -> torch.Tensor:
    levels = 2**VALUE_BITS
    centre, width = values.mean(), RANGE * values.std() / levels + 1e-12
    cells = ((values - centre) / width + levels / 2).floor().clamp(0, levels - 1).long()
    counts = torch.zeros(levels, device=values.device).index_add_(0, cells.flatten(), torch.ones_like(values).flatten())
    sums = torch.zeros(levels, device=values.device).index_add_(0, cells.flatten(), values.flatten())
    return (sums / counts.clamp(min=1))[cells]
