"""fashion-mnist: 70,000 grey images of clothes, from the four standard idx files.

H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms, 2017, https://arxiv.org/abs/1708.07747.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from torch import nn

from gradwire.tasks.base import DataError, Defaults
from gradwire.tasks.images import ImageTask, LabelledImages

SOURCE = "https://github.com/zalandoresearch/fashion-mnist (Debian: the package dataset-fashion-mnist)"
# The folder itself, or as torchvision lays it out below its root.
FOLDERS = (".", "fashion-mnist", "FashionMNIST/raw")


class FashionMnist(ImageTask):
    """Fashion-MNIST with a small convolutional network."""

    name = "fashion-mnist"
    description = "28x28 clothes from idx files in --data-dir; small conv net"
    defaults = Defaults(lr=0.05, batch_size=64, epochs=5)

    def __init__(self, data_dir: Path) -> None:
        self.set_data(_read_part(data_dir, "train"), _read_part(data_dir, "t10k"))

    def build_model(self) -> nn.Module:
        """Return a new network of two convolutions and two linear layers."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def _read_part(data_dir: Path, part: str) -> LabelledImages:
    images = _read_idx(_find(data_dir, f"{part}-images-idx3-ubyte"), dimensions=3)
    labels = _read_idx(_find(data_dir, f"{part}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels) or images.shape[1:] != (28, 28) or labels.max(initial=0) > 9:
        raise DataError(f"the {part} files in {data_dir} are not Fashion-MNIST; get them from {SOURCE}")
    return LabelledImages.from_numpy(images[:, None], labels)


def _find(data_dir: Path, name: str) -> Path:
    for folder in FOLDERS:
        for path in (data_dir / folder / name, data_dir / folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(
        f"no {name} or {name}.gz in {data_dir}; put the four Fashion-MNIST idx files there or name their "
        f"folder with --data-dir; they come from {SOURCE}"
    )


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file: 0, 0, 8 (for uint8), the number of dimensions, each size (big-endian), the values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path} is damaged ({error}); get it again from {SOURCE}") from error
    values = np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions))
    if magic != 0x800 + dimensions or values.size != np.prod(shape):
        raise DataError(f"{path} is not an idx file of {dimensions} dimensions; get it again from {SOURCE}")
    return values.reshape(shape).copy()  # frombuffer's view is read-only
