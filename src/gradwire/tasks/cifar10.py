"""cifar10: 60,000 colour images of 32x32 pixels, ResNet-20.

A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Read from the folder
`cifar-10-batches-py` as published, or from image files in `train/CLASS/` and `test/CLASS/`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire.tasks.base import DataError, Defaults
from gradwire.tasks.images import ImageTask, LabelledImages, random_crop_and_flip
from gradwire.tasks.resnet import ResNet20

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html (CIFAR-10 python version)"
BATCHES = "cifar-10-batches-py"
SUFFIXES = (".jpg", ".jpeg", ".png")


class Cifar10(ImageTask):
    """CIFAR-10 with ResNet-20."""

    name = "cifar10"
    description = "32x32 colour images from --data-dir; ResNet-20"
    defaults = Defaults(lr=0.1, batch_size=64, epochs=30)

    def __init__(self, data_dir: Path) -> None:
        for batches in (data_dir / BATCHES, data_dir):
            if (batches / "data_batch_1").is_file():
                train = _read_batches([batches / f"data_batch_{i}" for i in range(1, 6)])
                self.set_data(train, _read_batches([batches / "test_batch"]))
                return
        if not (data_dir / "train").is_dir() or not (data_dir / "test").is_dir():
            raise DataError(
                f"no CIFAR-10 in {data_dir}; expected the folder {BATCHES} from {SOURCE}, or images in "
                "train/CLASS/ and test/CLASS/; name the folder that holds them with --data-dir"
            )
        classes = sorted(folder.name for folder in (data_dir / "train").iterdir() if folder.is_dir())
        self.set_data(*(_read_images(data_dir / part, classes) for part in ("train", "test")))

    def build_model(self) -> nn.Module:
        """Return a new ResNet-20."""
        return ResNet20(classes=10)

    def augment(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Crop each image at random after padding it by 4 pixels, and mirror half of them."""
        return random_crop_and_flip(pixels, generator, padding=4)


class Cifar10Small(Cifar10):
    """CIFAR-10 with a small convolutional network."""

    name = "cifar10-small"
    description = "the same images; small conv net, for CPUs and federated clients"
    defaults = Defaults(lr=0.05, batch_size=64, epochs=10)

    def build_model(self) -> nn.Module:
        """Return a new network of three convolutions and two linear layers."""
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays and plain values only: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 renamed numpy.core; the published files carry the old name.
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _reconstruct(array_type: type[np.ndarray], shape: tuple[int, ...], _: bytes) -> np.ndarray:
    """An empty array; its real shape and type come with the pickle's next instruction."""
    return np.ndarray.__new__(array_type, shape, np.uint8)


def _read_batches(paths: list[Path]) -> LabelledImages:
    pixels, labels = zip(*(_read_batch(path) for path in paths), strict=True)
    return LabelledImages.from_numpy(np.concatenate(pixels), np.concatenate(labels))


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = content[b"data"].reshape(-1, 3, 32, 32), np.array(content[b"labels"])
        if pixels.dtype != np.uint8 or labels.shape != pixels.shape[:1]:
            raise ValueError("pixels or labels of an unexpected form")
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is missing or damaged ({error}); get it again from {SOURCE}") from error
    return pixels, labels


def _read_images(folder: Path, classes: list[str]) -> LabelledImages:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading images needs Pillow: pip install 'gradwire[images]'") from None
    pixels, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*")):
            if path.suffix.lower() not in SUFFIXES:
                continue
            try:
                with Image.open(path) as image:
                    array = np.asarray(image.convert("RGB"))
            except OSError as error:
                raise DataError(f"{path} cannot be read as an image ({error})") from error
            if array.shape != (32, 32, 3):
                raise DataError(f"{path} has {array.shape[1]}x{array.shape[0]} pixels, expected 32x32")
            pixels.append(array)
            labels.append(label)
    if not pixels or len(classes) > 10:
        raise DataError(f"{folder} should hold up to ten folders of .jpg or .png images, one per class")
    return LabelledImages.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2), np.array(labels))
