"""The model, its data, and functions to train and test it, without Flower or compression."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.tasks.digits import Digits  # 1,797 images of 8x8 pixels that come with the package: no download


class Net(nn.Module):
    """A small convolutional network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(64 * 4 * 4, 96)
        self.fc2 = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten classes."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.relu(self.fc1(self.pool(x).flatten(1)))
        return self.fc2(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return one client's images, every num_partitions-th of all: four fifths to train on, one fifth to evaluate."""
    data = Digits(Path())
    indices = torch.arange(partition_id, data.train_size, num_partitions)
    held_out = torch.arange(len(indices)) % 5 == 0
    images, labels = data.normalize(data.train.pixels[indices]), data.train.labels[indices]
    train_set = TensorDataset(images[~held_out], labels[~held_out])
    test_set = TensorDataset(images[held_out], labels[held_out])
    return DataLoader(train_set, batch_size=batch_size, shuffle=True), DataLoader(test_set, batch_size=batch_size)


def load_centralized_data() -> DataLoader:
    """Return images for the server that no client trains on."""
    data = Digits(Path())
    return DataLoader(TensorDataset(data.normalize(data.test.pixels), data.test.labels), batch_size=128)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float, device: torch.device) -> float:
    """Train the model in place, and return the mean loss of all batches."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.to(device).eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs = net(images.to(device))
        loss += F.cross_entropy(outputs, labels.to(device), reduction="sum").item()
        correct += int((outputs.argmax(1) == labels.to(device)).sum())
        count += len(labels)
    return loss / count, correct / count
