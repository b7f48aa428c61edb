"""Functional layers: `F.linear(x, self.qkv.weight)`, slices of weights, computed weights, convolutions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.layers import QuantFunction, QuantLayer, QuantLinear
from qat.preparation.report import LEFT_IN_FLOAT, noted
from tests.references.prepared_case import (
    Plain,
    activation_quantizers,
    assert_computes_as,
    assert_takes_float_state,
    draw,
    prepared_whole,
)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))  # Plain draws the values


def quantized_layers(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def in_two_slices(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.w[:8], self.b[:8]) + F.linear(x, self.w[8:], self.b[8:])


def normalised(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True), self.b)


def standardised(self: Any, x: Tensor) -> Tensor:
    weight = self.w - self.w.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight / self.w.std((1, 2, 3), keepdim=True), padding=1)


def whole(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.l.weight, self.l.bias)


FLAT, IMAGE = draw(6, 8), draw(2, 3, 8, 8)

# Forward, parts, input, and the resulting quantized layers.
READS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor, dict[str, type[nn.Module]]]] = {
    "whole": (whole, {"l": nn.Linear(8, 8)}, FLAT, {"l": QuantLinear}),
    "another bias": (
        lambda self, x: F.linear(x, self.l.weight, self.b),
        {"l": nn.Linear(8, 8), "b": parameter(8)}, FLAT, {"l": QuantLinear},
    ),
    "a bias for one without": (
        lambda self, x: F.linear(x, self.l.weight, self.b),
        {"l": nn.Linear(8, 8, bias=False), "b": parameter(8)}, FLAT, {"l": QuantLinear},
    ),
    "twice": (
        lambda self, x: F.linear(F.linear(x, self.l.weight, self.l.bias), self.l.weight, self.l.bias),
        {"l": nn.Linear(8, 8)}, FLAT, {"l": QuantLinear},
    ),
    "read and called": (
        lambda self, x: self.l(F.linear(x, self.l.weight, self.l.bias)),
        {"l": nn.Linear(8, 8)}, FLAT, {"l": QuantLinear},
    ),
    "transposed": (
        lambda self, x: F.linear(x, self.l.weight.t()), {"l": nn.Linear(8, 8)}, FLAT, {"linear": QuantFunction},
    ),
    "slices": (
        in_two_slices, {"w": parameter(16, 8), "b": parameter(16)}, FLAT,
        {"linear": QuantFunction, "linear_1": QuantFunction},
    ),
    "normalised by hand": (
        normalised, {"g": parameter(8, 1), "v": parameter(8, 8), "b": parameter(8)}, FLAT, {"linear": QuantFunction},
    ),
    "conv2d": (
        lambda self, x: F.conv2d(x, self.w, self.b, 2, 1),
        {"w": parameter(4, 3, 3, 3), "b": parameter(4)}, IMAGE, {"conv2d": QuantFunction},
    ),
    "grouped conv2d": (
        lambda self, x: F.conv2d(x, self.w, None, 1, 1, 1, 3), {"w": parameter(3, 1, 3, 3)}, IMAGE,
        {"conv2d": QuantFunction},
    ),
    "a layer's conv2d": (
        lambda self, x: F.conv2d(x, self.l.weight, self.l.bias, padding=1), {"l": nn.Conv2d(3, 4, 3)}, IMAGE,
        {"conv2d": QuantFunction},
    ),
    "standardised conv2d": (standardised, {"w": parameter(4, 3, 3, 3)}, IMAGE, {"conv2d": QuantFunction}),
    "conv1d": (
        lambda self, x: F.conv1d(x.flatten(2), self.w), {"w": parameter(4, 3, 5)}, IMAGE, {"conv1d": QuantFunction},
    ),
    "conv3d": (
        lambda self, x: F.conv3d(x[:, :, None], self.w), {"w": parameter(4, 3, 1, 3, 3)}, IMAGE,
        {"conv3d": QuantFunction},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_a_weight_is_quantized_where_it_is_read(case: str) -> None:
    forward, parts, x, layers = READS[case]
    net = Plain(forward, **parts).eval()
    model = prepared_whole(net, x)
    assert quantized_layers(model) == layers
    assert_takes_float_state(model, net.state_dict())


def mixed(self: Any, x: Tensor) -> Tensor:
    """A convolution with its own kernel, a linear function on a slice, and one on a layer's weight."""
    return whole(self, F.relu(F.linear(F.conv2d(x, self.kernel).flatten(1), self.w[:8])))


MIXED = Plain(mixed, kernel=parameter(2, 3, 7, 7), w=parameter(16, 8), l=nn.Linear(8, 8)).eval()


@pytest.mark.parametrize(
    ("pattern", "quantized", "left"),
    [
        ("linear", {"conv2d", "l"}, {"linear", "w"}),
        ("l", {"conv2d", "linear"}, {"l"}),
        ("type:Conv2d", {"linear", "l"}, {"conv2d", "kernel"}),
        ("type:Linear", {"conv2d"}, {"linear", "l", "w"}),
    ],
)
def test_patterns_skip_reads_by_name_and_kind(pattern: str, quantized: set[str], left: set[str]) -> None:
    model = qat.prepare(MIXED, qat.QuantRecipe(overrides={pattern: {"skip": True}}), example_inputs=IMAGE)
    reasons = noted(model, LEFT_IN_FLOAT)
    assert set(quantized_layers(model)) == quantized and set(reasons) == left
    skipped = {name for name, reason in reasons.items() if reason == f"skipped by the recipe's pattern {pattern!r}"}
    assert skipped == {"conv2d", "linear", "l"} - quantized
    assert_computes_as(MIXED, model, IMAGE)


def test_patterns_choose_the_grids_of_reads() -> None:
    overrides = {"lin*": {"weight": {"bits": 4}, "activation": {"bits": 6}}, "type:Conv2d": {"weight": {"bits": 5}}}
    model = qat.prepare(MIXED, qat.QuantRecipe(overrides=overrides), example_inputs=IMAGE)
    assert {name: model.get_submodule(name).weight_quantizer.spec.bits for name in quantized_layers(model)} == {
        "conv2d": 5, "linear": 4, "l": 8,
    }  # fmt: skip
    assert {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)} == {
        "input_quantizer": 8, "conv2d_quantizer": 6, "linear_quantizer": 8,
    }  # fmt: skip


def test_functions_without_a_twin_are_named() -> None:
    net = Plain(
        lambda self, x: self.c(F.conv_transpose2d(x, self.w)), w=parameter(3, 4, 3, 3), c=nn.Conv2d(4, 4, 3)
    ).eval()
    model = qat.prepare(net, example_inputs=IMAGE)
    assert noted(model, LEFT_IN_FLOAT) == {
        "conv_transpose2d": "conv_transpose2d of these operands has no quantized twin",
        "w": "conv_transpose2d reads it as a plain tensor",
    }
    assert_computes_as(net, model, IMAGE)
