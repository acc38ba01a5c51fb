"""digits: handwritten digits of 8x8 pixels, inside the package, so it runs anywhere in seconds.

The data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0. digits.npz holds the 1,797 images that
scikit-learn carries, unchanged (scripts/make_digits.py); every fifth is kept for the test.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from torch import nn

from gradwire.tasks.base import Defaults
from gradwire.tasks.images import ImageTask, LabelledImages


class Digits(ImageTask):
    """Handwritten digits of 8x8 pixels with a small convolutional network."""

    name = "digits"
    description = "8x8 handwritten digits, inside the package; small conv net"
    defaults = Defaults(lr=0.05, batch_size=32, epochs=20)

    def __init__(self, data_dir: Path) -> None:
        with as_file(files(__package__) / "digits.npz") as path, np.load(path) as archive:
            pixels, labels = archive["images"][:, None], archive["labels"]
        held_out = np.arange(len(labels)) % 5 == 0
        self.set_data(
            LabelledImages.from_numpy(pixels[~held_out], labels[~held_out]),
            LabelledImages.from_numpy(pixels[held_out], labels[held_out]),
        )

    def build_model(self) -> nn.Module:
        """Return a new network of two convolutions and two linear layers."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )
