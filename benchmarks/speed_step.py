"""A whole training step: forward, cross entropy, backward, SGD with momentum."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.speed_timing import Call
from benchmarks.speed_variants import BUILDERS

CLASSES = 1000
COMPILED = "_compiled"
"""Ending of a variant that goes through torch.compile."""
LEARNING_RATE = 1e-4
SIZES = {"vit_b_16": 224}
"""Height and width of the images, where it is not 112."""


@dataclass(frozen=True)
class Setting:
    """What is trained, on what.

    Attributes:
        model: its name in torchvision.
        batch: images a step.
        size: their height and width.
        layout: memory format of images and weights, `channels_last` or `contiguous`.
        device: `cpu` or `cuda`.
        amp: `none` or `bf16`, under autocast.
    """

    model: str
    batch: int = 16
    size: int = 112
    layout: str = "channels_last"
    device: str = "cpu"
    amp: str = "none"

    def images(self) -> Tensor:
        """A random batch."""
        images = torch.randn(self.batch, 3, self.size, self.size, device=self.device)
        return images.contiguous(memory_format=memory_format(self.layout))

    def facts(self) -> dict[str, Any]:
        """As a row says it."""
        return {
            "subject": self.model,
            "batch": self.batch,
            "size": self.size,
            "layout": self.layout,
            "device": self.device,
            "amp": self.amp,
        }


class TrainingStep:
    """Runs one step a call; remembers the loss, and says whether it stayed finite."""

    def __init__(self, model: nn.Module, images: Tensor, amp: str = "none") -> None:
        self.model = model
        self.images = images
        self.amp = amp
        self.labels = torch.randint(CLASSES, (len(images),), device=images.device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.losses: list[Tensor] = []

    def loss(self) -> Tensor:
        """The forward half."""
        with torch.autocast(self.images.device.type, dtype=torch.bfloat16, enabled=self.amp == "bf16"):
            return F.cross_entropy(self.model(self.images), self.labels)

    def __call__(self) -> None:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())  # looked at later: reading it would wait for the device

    def problem(self) -> str | None:
        """What is wrong with the losses so far."""
        losses = torch.stack(self.losses).float()
        if losses.isfinite().all():
            return None
        first = int((~losses.isfinite()).nonzero()[0])
        return f"fails: the loss of step {first + 1} is {float(losses[first])}"


def build_float(setting: Setting) -> nn.Module:
    """The float model with random weights, seed 0, on the device and in the layout."""
    torch.manual_seed(0)
    size = {"image_size": setting.size} if setting.model.startswith("vit_") else {}
    model: nn.Module = torchvision.models.get_model(setting.model, weights=None, num_classes=CLASSES, **size)
    return model.to(setting.device, memory_format=memory_format(setting.layout))


def memory_format(layout: str) -> torch.memory_format:
    """torch's word for `channels_last` or `contiguous`."""
    return torch.channels_last if layout == "channels_last" else torch.contiguous_format


def build_step(variant: str, model: nn.Module, images: Tensor, amp: str = "none") -> TrainingStep:
    """A step of one variant, which gets a copy of the model. With the ending `_compiled`, compiled."""
    built = BUILDERS[variant.removesuffix(COMPILED)](copy.deepcopy(model), images)
    if variant.endswith(COMPILED):
        compiled = torch.compile(built, fullgraph=True)
        assert isinstance(compiled, nn.Module)
        built = compiled
    return TrainingStep(built, images, amp)


def step_makers(setting: Setting, variants: Iterable[str]) -> dict[str, Callable[[], Call]]:
    """For every variant what builds its step, all from the same weights and images."""
    model, images = build_float(setting), setting.images()

    def maker(variant: str) -> Callable[[], Call]:
        return lambda: build_step(variant, model, images, setting.amp)

    return {variant: maker(variant) for variant in variants}
