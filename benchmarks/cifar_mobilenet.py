"""MobileNetV2 (arXiv:1801.04381) at half its width for images of 32 pixels: torchvision's, with fewer strides.

python train.py --config mobilenet_v2_cifar10_w4a4 data.root=CIFAR10.npz
"""

from torch import nn
from torchvision.models import mobilenet_v2 as torchvision_mobilenet_v2

STAGES = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 1], [6, 320, 1, 1]]
"""Expansion, channels, blocks and stride of each stage; the last pixels are 4 by 4."""


def mobilenet_v2(num_classes: int = 10) -> nn.Module:
    """17 depthwise blocks, 700,000 parameters, no weights."""
    model = torchvision_mobilenet_v2(width_mult=0.5, inverted_residual_setting=STAGES, num_classes=num_classes)
    model.features[0][0].stride = (1, 1)
    return model
