"""The two trainings of benchmarks/backward_models.py: a transformer on bytes of text, an MLP-Mixer on CIFAR-10."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradwire.tasks.cifar10 import Cifar10
from gradwire.tasks.images import LabelledImages
from gradwire.tasks.text import _source_files

Batch = tuple[torch.Tensor, torch.Tensor]
VALIDATION = 32  # batches of text; CIFAR-10 has its own 10,000 images


class Size(NamedTuple):
    width: int
    depth: int
    batch: int  # texts or images
    lr: float
    steps: int
    context: int = 0  # bytes of a text


SIZES = {
    ("text", "small"): Size(width=128, depth=2, batch=16, lr=3e-3, steps=600, context=64),
    ("text", "large"): Size(width=768, depth=12, batch=64, lr=6e-4, steps=500, context=256),
    ("mixer", "small"): Size(width=64, depth=2, batch=32, lr=2e-3, steps=400),
    ("mixer", "large"): Size(width=768, depth=12, batch=256, lr=5e-4, steps=500),
}


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // min(64, width // 2)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.mlp = Attention(width), MLP(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Bytes [batch, context] to logits [batch × context, 256] for the byte that follows each."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(TransformerBlock(size.width) for _ in range(size.depth)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class MixerBlock(nn.Module):
    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.places, self.channels = MLP(places, 4 * places), MLP(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer (arXiv 2105.01601): images [batch, 3, 32, 32] in patches of 4×4 to the logits of ten classes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 4 * 4, size.width)
        self.blocks = nn.Sequential(*(MixerBlock(size.width, places=64) for _ in range(size.depth)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = functional.pixel_unshuffle(images, 4).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patches(patches))).mean(1))


class TextTask:
    """Windows anywhere in the source files of Python's standard library; every tenth file is for validation."""

    name = "text"

    def __init__(self, size: Size, device: torch.device, data_dir: Path) -> None:
        paths = _source_files(Path(sysconfig.get_paths()["stdlib"]))
        self.size, self.device = size, device
        self.train = self._read([path for i, path in enumerate(paths) if i % 10])
        self.test = self._read(paths[::10])
        self.data = f"{len(self.train) / 1e6:.1f} MB of text"

    def _read(self, paths: list[Path]) -> torch.Tensor:
        text = b"".join(path.read_bytes() for path in paths)
        return torch.from_numpy(np.frombuffer(text, np.uint8).copy()).to(self.device)

    def build_model(self) -> nn.Module:
        return Transformer(self.size)

    def batch(self, generator: torch.Generator) -> Batch:
        return self._windows(self.train, generator)

    def validation(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        return (self._windows(self.test, generator) for _ in range(VALIDATION))

    def _windows(self, text: torch.Tensor, generator: torch.Generator) -> Batch:
        length = self.size.context
        starts = torch.randint(len(text) - length, (self.size.batch, 1), generator=generator).to(self.device)
        windows = text[starts + torch.arange(length + 1, device=self.device)].long()
        return windows[:, :-1], windows[:, 1:].flatten()


class MixerTask:
    """CIFAR-10, shifted and mirrored at random."""

    name = "mixer"

    def __init__(self, size: Size, device: torch.device, data_dir: Path) -> None:
        self.size, self.device, self.images = size, device, Cifar10(data_dir)
        for part in ("train", "test"):
            pixels, labels = getattr(self.images, part)
            setattr(self.images, part, LabelledImages(pixels.to(device), labels.to(device)))
        self.data = f"{self.images.train_size} images"

    def build_model(self) -> nn.Module:
        return Mixer(self.size)

    def batch(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(self.images.train_size, (self.size.batch,), generator=generator)
        return self.images.train_batch(chosen.to(self.device), generator)

    def validation(self) -> Iterator[Batch]:
        every = torch.arange(self.images.test_size, device=self.device)
        return (self.images.test_batch(part) for part in every.split(500))


TASKS = {task.name: task for task in (TextTask, MixerTask)}
