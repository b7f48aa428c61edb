"""Training any rule for a few steps and comparing states, for the tests of the rules."""

from collections.abc import Callable

import rule_specs as specs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.quantizer import Quantizer


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
