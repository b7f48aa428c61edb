"""Weights that functions read, and BatchNorms that are handed to the layer before them: the results stay the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops import FrozenBatchNorm2d

import qat
from qat.layers import QuantEmbedding, QuantFunction, QuantLayer, QuantLinear
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, prepared_whole


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
    "another bias": (lambda self, x: F.linear(x, self.l.weight, self.b), {"l": nn.Linear(8, 8), "b": parameter(8)},
                     FLAT, {"l": QuantLinear}),
    "a bias for one without": (lambda self, x: F.linear(x, self.l.weight, self.b),
                               {"l": nn.Linear(8, 8, bias=False), "b": parameter(8)}, FLAT, {"l": QuantLinear}),
    "twice": (lambda self, x: F.linear(F.linear(x, self.l.weight, self.l.bias), self.l.weight, self.l.bias),
              {"l": nn.Linear(8, 8)}, FLAT, {"l": QuantLinear}),
    "read and called": (lambda self, x: self.l(F.linear(x, self.l.weight, self.l.bias)), {"l": nn.Linear(8, 8)}, FLAT,
                        {"l": QuantLinear}),
    "of an embedding": (lambda self, x: F.linear(self.e(x), self.e.weight), {"e": nn.Embedding(10, 8)},
                        torch.arange(10).view(2, 5), {"e": QuantEmbedding, "linear": QuantFunction}),
    "transposed": (lambda self, x: F.linear(x, self.l.weight.t()), {"l": nn.Linear(8, 8)}, FLAT,
                   {"linear": QuantFunction}),
    "slices": (in_two_slices, {"w": parameter(16, 8), "b": parameter(16)}, FLAT,
               {"linear": QuantFunction, "linear_1": QuantFunction}),
    "normalised by hand": (normalised, {"g": parameter(8, 1), "v": parameter(8, 8), "b": parameter(8)}, FLAT,
                           {"linear": QuantFunction}),
    "conv2d": (lambda self, x: F.conv2d(x, self.w, self.b, 2, 1), {"w": parameter(4, 3, 3, 3), "b": parameter(4)},
               IMAGE, {"conv2d": QuantFunction}),
    "grouped conv2d": (lambda self, x: F.conv2d(x, self.w, None, 1, 1, 1, 3), {"w": parameter(3, 1, 3, 3)}, IMAGE,
                       {"conv2d": QuantFunction}),
    "a layer's conv2d": (lambda self, x: F.conv2d(x, self.l.weight, self.l.bias, padding=1), {"l": nn.Conv2d(3, 4, 3)},
                         IMAGE, {"conv2d": QuantFunction}),
    "standardised conv2d": (standardised, {"w": parameter(4, 3, 3, 3)}, IMAGE, {"conv2d": QuantFunction}),
    "conv1d": (lambda self, x: F.conv1d(x.flatten(2), self.w), {"w": parameter(4, 3, 5)}, IMAGE,
               {"conv1d": QuantFunction}),
    "conv3d": (lambda self, x: F.conv3d(x[:, :, None], self.w), {"w": parameter(4, 3, 1, 3, 3)}, IMAGE,
               {"conv3d": QuantFunction}),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_a_weight_is_quantized_where_it_is_read(case: str) -> None:
    forward, parts, x, layers = READS[case]
    net = Plain(forward, **parts).eval()
    model = prepared_whole(net, x)
    assert quantized_layers(model) == layers
    checks.assert_takes_float_state(model, net.state_dict())


def test_a_parametrised_weight_that_a_function_reads() -> None:
    model = checks.prepared_near(Plain(whole, l=weight_norm(nn.Linear(8, 8))).eval(), FLAT)
    assert quantized_layers(model) == {"linear": QuantFunction}


def mixed(self: Any, x: Tensor) -> Tensor:
    """A convolution with its own kernel, a linear function on a slice, and one on a layer's weight."""
    return whole(self, F.relu(F.linear(F.conv2d(x, self.kernel).flatten(1), self.w[:8])))


MIXED = Plain(mixed, kernel=parameter(2, 3, 7, 7), w=parameter(16, 8), l=nn.Linear(8, 8)).eval()


@pytest.mark.parametrize(("pattern", "quantized", "left"), [
    ("linear", {"conv2d", "l"}, {"linear", "w"}),
    ("l", {"conv2d", "linear"}, {"l"}),
    ("type:Conv2d", {"linear", "l"}, {"conv2d", "kernel"}),
    ("type:Linear", {"conv2d"}, {"linear", "l", "w"}),
])  # fmt: skip
def test_patterns_skip_reads_by_name_and_kind(pattern: str, quantized: set[str], left: set[str]) -> None:
    model = qat.prepare(MIXED, qat.QuantRecipe(overrides={pattern: {"skip": True}}), example_inputs=IMAGE)
    reasons = notes_of(model, LEFT_IN_FLOAT)
    assert set(quantized_layers(model)) == quantized and set(reasons) == left
    skipped = {name for name, reason in reasons.items() if reason == f"skipped by the recipe's pattern {pattern!r}"}
    assert skipped == {"conv2d", "linear", "l"} - quantized
    assert_computes_as(MIXED, model, IMAGE)


def test_patterns_choose_the_grids_of_reads() -> None:
    overrides = {"lin*": {"weight": {"bits": 4}, "activation": {"bits": 6}}, "type:Conv2d": {"weight": {"bits": 5}}}
    model = qat.prepare(MIXED, qat.QuantRecipe(overrides=overrides), example_inputs=IMAGE)
    weights = {name: model.get_submodule(name).weight_quantizer.spec.bits for name in quantized_layers(model)}
    inputs = {name: model.get_submodule(name).spec.bits for name in checks.activation_quantizers(model)}
    assert weights == {"conv2d": 5, "linear": 4, "l": 8}
    assert inputs == {"input_quantizer": 8, "conv2d_quantizer": 6, "linear_quantizer": 8}


def test_functions_without_a_twin_are_named() -> None:
    parts = {"w": parameter(3, 4, 3, 3), "c": nn.Conv2d(4, 4, 3)}
    model = prepared_alike(Plain(lambda self, x: self.c(F.conv_transpose2d(x, self.w)), **parts).eval(), IMAGE)
    assert notes_of(model, LEFT_IN_FLOAT) == {
        "conv_transpose2d": "conv_transpose2d of these operands has no quantized twin",
        "w": "conv_transpose2d reads it as a plain tensor",
    }
    bags = Plain(lambda self, x: self.c(F.embedding_bag(x, self.w)), w=parameter(11, 4), c=nn.Linear(4, 3))
    found = notes_of(qat.prepare(bags, example_inputs=torch.arange(10).view(2, 5)), LEFT_IN_FLOAT)
    assert found == {"embedding_bag": "embedding_bag of these operands has no quantized twin"}


class NormAct(nn.BatchNorm2d):
    """Written like timm.layers.BatchNormAct2d."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        x = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))


def convs(**others: nn.Module) -> dict[str, nn.Module]:
    return {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1), "n": nn.BatchNorm2d(4), **others}


def bulk(self: Any, x: Tensor) -> Tensor:
    return self.b(F.relu(self.n(self.a(x))))


def read_by_others(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(self.n(y) + y)


IMAGES, ROWS, TOKENS = draw(4, 3, 6, 6), draw(6, 8), draw(3, 4, 8)
BEFORE, OTHERS = "no quantized convolution directly before it", "the output of a is read by others too"

# Forward, parts, input, the norms that are passed to layers in the order of the calls, and why the others are not.
NORMS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor, list[str], dict[str, str]]] = {
    "conv, norm, ReLU": (bulk, convs(), IMAGES, ["n"], {}),
    "without scale and shift": (bulk, convs(n=nn.BatchNorm2d(4, affine=False)), IMAGES, ["n"], {}),
    "frozen": (bulk, convs(n=FrozenBatchNorm2d(4)), IMAGES, ["n"], {}),
    "without statistics": (bulk, convs(n=nn.BatchNorm2d(4, track_running_stats=False)), IMAGES, [],
                           {"n": "it keeps no running statistics to fold"}),
    "another norm": (bulk, convs(n=nn.GroupNorm(2, 4)), IMAGES, [], {"n": "GroupNorm computes in float"}),
    "read by others": (read_by_others, convs(), IMAGES, [], {"n": OTHERS}),
    "norm first": (lambda self, x: self.b(self.a(self.n(x))), convs(n=nn.BatchNorm2d(3)), IMAGES, [], {"n": BEFORE}),
    "dropout between": (lambda self, x: self.b(self.n(F.dropout(self.a(x), 0.3, self.training))), convs(), IMAGES, [],
                        {"n": BEFORE}),
    "one layer, two norms": (lambda self, x: self.m(self.b(F.relu(self.n(self.b(self.a(x)))))),
                             convs(m=nn.BatchNorm2d(4)), IMAGES, ["n", "m"], {}),
    "two layers, one norm": (lambda self, x: self.n(self.b(F.relu(self.n(self.a(x))))), convs(), IMAGES, ["n", "n"],
                             {}),
    "a norm of a norm": (lambda self, x: self.b(self.m(self.n(self.a(x)))), convs(m=nn.BatchNorm2d(4)), IMAGES, ["n"],
                         {"m": "a folds another BatchNorm already"}),
    "an activation inside": (bulk, convs(n=NormAct(4, nn.SiLU())), IMAGES, ["n"], {}),
    "an activation with parameters inside": (bulk, convs(n=NormAct(4, nn.PReLU(4))), IMAGES, ["n"],
                                             {"n.act": "PReLU computes in float"}),
    "conv1d": (bulk, {"a": nn.Conv1d(3, 4, 3), "b": nn.Conv1d(4, 4, 1), "n": nn.BatchNorm1d(4)}, IMAGES[..., 0], ["n"],
               {}),
    "transposed": (bulk, convs(a=nn.ConvTranspose2d(3, 4, 2, stride=2)), IMAGES, ["n"], {}),
    "linear": (bulk, {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "n": nn.BatchNorm1d(8)}, ROWS, ["n"], {}),
    "linear, another axis": (bulk, {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "n": nn.BatchNorm1d(4)}, TOKENS, [],
                             {"n": BEFORE}),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_directly_behind_a_layer_is_handed_to_it(case: str) -> None:
    forward, parts, x, handed, left = NORMS[case]
    net = Plain(forward, **parts).eval()
    for name, buffer in net.named_buffers():
        if "running" in name or isinstance(net.n, FrozenBatchNorm2d):
            buffer.copy_(0.5 + draw(*buffer.shape, seed=len(name)).abs())
    model = prepared_whole(net, x, left)
    assert [str(node.kwargs["norm"].target) for node in model.graph.nodes if "norm" in node.kwargs] == handed


class Softer(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, 100 * self.eps)


def twice(self: Any, x: Tensor) -> Tensor:
    return self.n(self.b(self.n(self.a(x))))


@pytest.mark.parametrize(("forward", "norm"), [(bulk, Softer), (twice, NormAct)])
def test_a_norm_that_no_module_computes_stays_in_parts(forward: Any, norm: type[NormAct]) -> None:
    model = prepared_alike(Plain(forward, **convs(n=norm(4, nn.ReLU()))).eval(), IMAGES)
    assert "in evaluation only" in notes_of(model, LEFT_IN_FLOAT)["(the model)"]
