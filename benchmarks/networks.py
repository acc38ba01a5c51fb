"""Models that benchmarks train on thin links: few large tensors, or hundreds of small ones.

MobileNetV2 (arXiv 1801.04381) and ViT-tiny (arXiv 2010.11929, the size of DeiT-Ti) for images of 32×32, written out
since torch has no models of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


def mlp() -> nn.Module:
    """10.5 M parameters in six tensors."""
    return nn.Sequential(
        nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


# ── MobileNetV2 ──


def _convolution(before: int, after: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(after)]


class InvertedResidual(nn.Module):
    """A wide depthwise convolution between two narrow ends."""

    def __init__(self, before: int, after: int, stride: int, wider: int):
        super().__init__()
        wide = before * wider
        layers = [*_convolution(before, wide), nn.ReLU6()] if wider > 1 else []
        layers += [*_convolution(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_convolution(wide, after)]
        self.layers, self.adds = nn.Sequential(*layers), stride == 1 and before == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet_v2() -> nn.Module:
    """2.2 M parameters in 158 tensors; the first strides are 1, as images are small."""
    layers: list[nn.Module] = [*_convolution(3, 32, 3), nn.ReLU6()]
    width = 32
    for wider, after, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for i in range(count):
            layers.append(InvertedResidual(width, after, stride if i == 0 else 1, wider))
            width = after
    layers += [*_convolution(width, 1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10)]
    return nn.Sequential(*layers)


# ── ViT-tiny ──


class Block(nn.Module):
    """Attention and two linear layers, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.layers(self.norms[1](x))


class ViT(nn.Module):
    """Patches of 4×4, a class token, and blocks."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


def vit_tiny() -> nn.Module:
    """5.4 M parameters in 152 tensors."""
    return ViT(width=192, depth=12, heads=3)


class Network(NamedTuple):
    """A model, and the shape of a batch for it."""

    build: Callable[[], nn.Module]
    batch: tuple[int, ...]


NETWORKS = {
    "mlp": Network(mlp, (16, 3072)),
    "mobilenet_v2": Network(mobilenet_v2, (4, 3, 32, 32)),
    "vit_tiny": Network(vit_tiny, (4, 3, 32, 32)),
}


def make_model(name: str) -> nn.Module:
    """Return the model of this name, the same on all ranks."""
    torch.manual_seed(0)
    return NETWORKS[name].build()
