"""A small vision transformer (arXiv:2010.11929) for images of 32 pixels: torchvision's, with patches of 4 pixels.

python train.py --config vit_cifar10_w4a4 data.root=CIFAR10.npz
"""

from torch import nn
from torchvision.models import VisionTransformer


def vit(num_classes: int = 10) -> nn.Module:
    """4 blocks of width 96 with 3 heads, 65 tokens, 310,000 parameters, no weights."""
    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=4, num_heads=3, hidden_dim=96, mlp_dim=192, num_classes=num_classes
    )
