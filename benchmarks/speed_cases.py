"""What the speed benchmark times: one float model as it is, and made ready for quantization by this project and peers.

Every builder takes a float model of its own and a batch of images, and returns a model in training mode. Peers are
imported only when they are built, and used as their own documentation says, with 8-bit weights per output channel and
8-bit activations per tensor.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.speed_timing import Call

Builder = Callable[[nn.Module, Tensor], nn.Module]

CLASSES = 1000
LEARNING_RATE = 1e-4
STATISTICS = 5
"""Passes that give BatchNorms the statistics of the images: without, answers of fresh networks fade in evaluation."""
COLLECTED = 1
"""Steps in which Brevitas collects statistics before its activation scales are parameters (300 by its default)."""


@dataclass(frozen=True)
class Setting:
    """What is run, on what."""

    subject: str  # the model's name in torchvision
    batch: int = 16
    size: int = 112  # height and width of the images
    device: str = "cpu"

    def images(self) -> Tensor:
        """A random batch."""
        images = torch.randn(self.batch, 3, self.size, self.size, device=self.device)
        return images.contiguous(memory_format=torch.channels_last)


class TrainingStep:
    """Runs forward, cross entropy, backward and SGD with momentum; remembers the loss, and whether it stayed finite."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model = model
        self.images = images
        self.labels = torch.randint(CLASSES, (len(images),), device=images.device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.losses: list[Tensor] = []

    def loss(self) -> Tensor:
        """The forward half."""
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
    """The float model with random weights, seed 0, on the device."""
    torch.manual_seed(0)
    size = {"image_size": setting.size} if setting.subject.startswith("vit_") else {}
    model: nn.Module = torchvision.models.get_model(setting.subject, weights=None, num_classes=CLASSES, **size)
    return model.to(setting.device, memory_format=torch.channels_last)


def evaluation(model: nn.Module, images: Tensor) -> Call:
    """What evaluates a batch without gradients."""
    model.eval()
    return torch.no_grad()(lambda: model(images))


def makers(
    setting: Setting, variants: Iterable[str], call: Callable[[nn.Module, Tensor], Call]
) -> dict[str, Callable[[], Call]]:
    """For every variant what builds its call, all from the same weights, statistics and images."""
    model, images = build_float(setting), setting.images()
    with torch.no_grad():
        for _ in range(STATISTICS):
            model(images)

    def maker(variant: str) -> Callable[[], Call]:
        return lambda: call(BUILDERS[variant](copy.deepcopy(model), images), images)

    return {variant: maker(variant) for variant in variants}


def float_model(model: nn.Module, images: Tensor) -> nn.Module:
    """As it is."""
    return model.train()


def qat_model(model: nn.Module, images: Tensor) -> nn.Module:
    """This project, with its defaults: every scale and zero point is learned."""
    import qat

    qat.reestimate_batch_norm(model, [images])  # ranges of fresh statistics would clip everything
    prepared = qat.prepare(model, example_inputs=images)
    qat.calibrate(prepared, [images])
    return prepared.train()


def ao_fx_model(model: nn.Module, images: Tensor) -> nn.Module:
    """torch.ao's FX graph mode with the qconfig of the x86 engine: moving averages, no learned scale."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (images,))
    assert isinstance(prepared, nn.Module)
    return prepared.train()


def pt2e_model(model: nn.Module, images: Tensor) -> nn.Module:
    """torchao's PT2E with the X86InductorQuantizer; strict export, since non-strict ones stumble over shared ReLUs."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    exported = torch.export.export(model.train(), (images,), strict=True).module(check_guards=False)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported, quantizer)
    move_exported_model_to_train(prepared)  # an exported model refuses train()
    return prepared


def brevitas_model(model: nn.Module, images: Tensor) -> nn.Module:
    """Brevitas' convolutions and linear layers in place of the float ones, once their activation scales are learned."""
    from brevitas.quant import Int8ActPerTensorFloat

    activation = Int8ActPerTensorFloat.let(collect_stats_steps=COLLECTED)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (nn.Conv2d, nn.Linear):
                setattr(module, name, _brevitas_layer(child, activation))
    model.train()
    with torch.no_grad():
        for _ in range(COLLECTED + 1):
            model(images)
    return model


def _brevitas_layer(layer: nn.Conv2d | nn.Linear, activation: type) -> nn.Module:
    """Its twin of a layer, with the same weights."""
    import brevitas.nn as bnn
    from brevitas.quant import Int8WeightPerChannelFloat

    given: dict[str, Any] = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": activation}
    given["bias"] = layer.bias is not None
    if isinstance(layer, nn.Linear):
        twin = bnn.QuantLinear(layer.in_features, layer.out_features, **given)
    else:
        given |= {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
        twin = bnn.QuantConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, **given)
    twin.load_state_dict(layer.state_dict(), strict=False)
    return twin.to(memory_format=torch.channels_last) if isinstance(layer, nn.Conv2d) else twin


BUILDERS: dict[str, Builder] = {
    "float": float_model,
    "qat": qat_model,
    "ao_fx": ao_fx_model,
    "pt2e": pt2e_model,
    "brevitas": brevitas_model,
}

TITLES = {
    "float": "float",
    "qat": "qat",
    "ao_fx": "torch.ao FX",
    "pt2e": "torchao PT2E",
    "brevitas": "Brevitas",
}
"""How tables call the variants; their order is that of the columns."""
