"""Mixup and cutmix of training batches, by torchvision."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from qat.training.config.stages import StageConfig

Mixing: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From images (N, C, H, W) and labels (N,) to mixed images and a share of every class for each, (N, classes)."""


def build_mixing(stage: StageConfig, classes: int) -> Mixing | None:
    """What mixes the stage's batches: mixup, cutmix, or for each batch one of the two, evenly; None for nothing.

    Image i is mixed with image i - 1 of its batch, and their labels in the same shares. The random numbers are of
    torch's generator on the CPU, whose state is in the checkpoints; nothing is read from the device.
    """
    if not (stage.mixup_alpha or stage.cutmix_alpha):
        return None
    from torchvision.transforms import v2  # late, since it takes seconds

    wanted = ((v2.MixUp, stage.mixup_alpha), (v2.CutMix, stage.cutmix_alpha))
    mixings = [kind(alpha=alpha, num_classes=classes) for kind, alpha in wanted if alpha]
    mixing: Mixing = v2.RandomChoice(mixings)
    return mixing
