"""ResNet-20 for 32x32 images.

K. He, X. Zhang, S. Ren, J. Sun, Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2:
three stages of n = 3 blocks with 16, 32 and 64 channels, and shortcuts without parameters (option A).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first halves the resolution where the channels double."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.new_channels = outputs // inputs, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [N, inputs, H, W] to [N, outputs, H/stride, W/stride]."""
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.new_channels:
            # Every second pixel, and zeros for the channels that the input does not have.
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return functional.relu(x + y)


class ResNet20(nn.Module):
    """The network of the paper with 20 layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in pairwise(widths)))
        self.classify = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [N, 3, H, W] to logits [N, classes]."""
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        logits: torch.Tensor = self.classify(x.mean((2, 3)))
        return logits
