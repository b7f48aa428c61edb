"""The ResNets for CIFAR of He et al. (arXiv:1512.03385, section 4.2), with parameter-free shortcuts (option A).

Named so that published state dicts load: conv1, bn1, layer1 to layer3 of blocks conv1/bn1/conv2/bn2, linear.

    python train.py --config resnet20_cifar10_w4a4 data.root=... model.checkpoint=...
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shortcut(nn.Module):
    """Option A: halve the resolution by striding, pad the new channels with zeros on both sides."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.side = new_channels // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.side, self.side))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = Shortcut(channels - in_channels) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """Three stages of `blocks` basic blocks with 16, 32 and 64 channels; 6 * blocks + 2 layers."""

    def __init__(self, blocks: int, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, num_classes)

    @staticmethod
    def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def resnet20(num_classes: int = 10) -> CifarResNet:
    """ResNet-20: 0.27 million parameters."""
    return CifarResNet(3, num_classes)
