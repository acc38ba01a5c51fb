"""What the image tasks share: uint8 images in memory, normalized when a batch is made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gradwire.tasks.base import Batch, Task, checksum


class LabelledImages(NamedTuple):
    """Pixels [N, channels, height, width] as uint8, labels [N]."""

    pixels: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def from_numpy(cls, pixels: np.ndarray, labels: np.ndarray) -> LabelledImages:
        """Make tensors of arrays; the pixels must be uint8."""
        return cls(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels.astype(np.int64)))


class ImageTask(Task):
    """Images to one of some classes. A subclass fills `train` and `test` in its `__init__`."""

    train: LabelledImages
    test: LabelledImages

    def set_data(self, train: LabelledImages, test: LabelledImages) -> None:
        """Keep the images, and measure mean and deviation of each channel on the training images."""
        self.train, self.test = train, test
        self.train_size, self.test_size = len(train.labels), len(test.labels)
        # Per channel, from the training images: no figures to keep in step with the data.
        pixels = train.pixels.transpose(0, 1).flatten(1).numpy()
        shape = (1, -1, 1, 1)
        self._mean = torch.from_numpy(pixels.mean(axis=1, dtype=np.float64)).float().view(shape)
        self._std = torch.from_numpy(pixels.std(axis=1, dtype=np.float64)).float().view(shape)

    def train_batch(self, indices: torch.Tensor, generator: torch.Generator) -> Batch:
        """Return these training images, augmented and normalized, and their labels."""
        return self.normalize(self.augment(self.train.pixels[indices], generator)), self.train.labels[indices]

    def test_batch(self, indices: torch.Tensor) -> Batch:
        """Return these test images, normalized, and their labels."""
        return self.normalize(self.test.pixels[indices]), self.test.labels[indices]

    def train_labels(self) -> torch.Tensor:
        """Return the class of each training image."""
        return self.train.labels

    def augment(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The images as they are; tasks that gain from augmentation override this."""
        return pixels

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels as floats with mean 0 and deviation 1 in each channel."""
        return (pixels.float() - self._mean.to(pixels.device)) / self._std.to(pixels.device)

    def data_checksum(self) -> int:
        """Return a checksum of all images and labels."""
        return checksum(*self.train, *self.test)


def random_crop_and_flip(pixels: torch.Tensor, generator: torch.Generator, padding: int) -> torch.Tensor:
    """Each image shifted by up to `padding` pixels either way, and mirrored half of the time; on their own device."""
    count, channels, height, width = pixels.shape
    padded = pixels.new_zeros(count, channels, height + 2 * padding, width + 2 * padding)
    padded[:, :, padding : padding + height, padding : padding + width] = pixels
    device = pixels.device
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device="cpu").to(device)
    mirrored = torch.randint(2, (count, 1), generator=generator, device="cpu").bool().to(device)
    rows = offsets[0] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = offsets[1] + torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(count, device=device)
    # Indexing with three arrays that broadcast to [N, height, width] puts the channels last.
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
