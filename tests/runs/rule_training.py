"""Training any rule for a few steps and comparing states, for the tests of the rules."""

from collections.abc import Callable
from typing import Any

from tests.references import rule_specs as specs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.quantizer import Quantizer
from qat.spec import QuantSpec


class Layers(nn.Module):
    """Two layers of one rule, without a BatchNorm, whose statistics would differ between ranks."""

    def __init__(self, weight_spec: QuantSpec, activation_spec: QuantSpec) -> None:
        super().__init__()
        torch.manual_seed(0)
        rules: dict[str, Any] = {"weight_spec": weight_spec, "activation_spec": activation_spec}
        self.conv = qat.QuantConv2d(4, 8, 3, **rules)
        self.clip = nn.Hardtanh() if activation_spec.rule == "binary" else nn.ReLU()
        self.fc = qat.QuantLinear(8, 5, **rules)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.clip(self.conv(x)).mean((2, 3)))


def images_for(activation_spec: QuantSpec, seed: int) -> Tensor:
    """`rule_specs.images`, without negative values if the grid of the first input has none."""
    x = specs.images(seed)
    return x.abs() if activation_spec.symmetric and not activation_spec.signed else x


def quantizers_of(model: nn.Module) -> dict[str, Quantizer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(model: nn.Module, inputs: list[Tensor], loss_of: Callable[[Tensor], Tensor]) -> None:
    """One SGD step for each input, with a hundredth of the rate for quantizers; every gradient must be finite."""
    learned = {id(parameter) for quantizer in quantizers_of(model).values() for parameter in quantizer.parameters()}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[id(parameter) in learned].append(parameter)
    optimizer = torch.optim.SGD([{"params": groups[False]}, {"params": groups[True], "lr": 2e-4}], lr=0.02)
    model.train()
    for step, x in enumerate(inputs):
        qat.set_progress(model, step / len(inputs))
        loss = loss_of(model(x)) + qat.penalty(model)
        assert loss.isfinite()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
        optimizer.step()


def answer_loss(y: Tensor) -> Tensor:
    return F.cross_entropy(y, specs.LABELS)
