"""What speeds are measured on: the processor, and numbers that are distributed as gradients are."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

BETA = 0.67  # of the generalized normal distribution: about what gradients have


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def gennorm_like(n: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    magnitude = torch.distributions.Gamma(1 / BETA, 1.0).sample((n,)).pow(1 / BETA)
    return magnitude * torch.sign(torch.randn(n)) * 1e-3
