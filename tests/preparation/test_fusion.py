"""BatchNorms in a prepared graph: which are passed to the layer before them, and that the results stay the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.ops import FrozenBatchNorm2d

import qat
from qat.preparation.report import LEFT_IN_FLOAT, noted
from tests.references.prepared_case import Plain, assert_close_to_float, assert_computes_as, draw


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


IMAGE, ROWS, TOKENS = draw(4, 3, 6, 6), draw(6, 8), draw(3, 4, 8)
BEFORE, OTHERS = "no quantized convolution directly before it", "the output of a is read by others too"

# Forward, parts, input, the norms that are passed to layers in the order of the calls, and why the others are not.
NORMS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor, list[str], dict[str, str]]] = {
    "conv, norm, ReLU": (bulk, convs(), IMAGE, ["n"], {}),
    "without scale and shift": (bulk, convs(n=nn.BatchNorm2d(4, affine=False)), IMAGE, ["n"], {}),
    "frozen": (bulk, convs(n=FrozenBatchNorm2d(4)), IMAGE, ["n"], {}),
    "without statistics": (
        bulk, convs(n=nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, [],
        {"n": "it keeps no running statistics to fold"},
    ),
    "another norm": (bulk, convs(n=nn.GroupNorm(2, 4)), IMAGE, [], {"n": "GroupNorm computes in float"}),
    "read by others": (read_by_others, convs(), IMAGE, [], {"n": OTHERS}),
    "norm first": (lambda self, x: self.b(self.a(self.n(x))), convs(n=nn.BatchNorm2d(3)), IMAGE, [], {"n": BEFORE}),
    "dropout between": (
        lambda self, x: self.b(self.n(F.dropout(self.a(x), 0.3, self.training))), convs(), IMAGE, [], {"n": BEFORE},
    ),
    "one layer, two norms": (
        lambda self, x: self.m(self.b(F.relu(self.n(self.b(self.a(x)))))), convs(m=nn.BatchNorm2d(4)), IMAGE,
        ["n", "m"], {},
    ),
    "two layers, one norm": (
        lambda self, x: self.n(self.b(F.relu(self.n(self.a(x))))), convs(), IMAGE, ["n", "n"], {},
    ),
    "a norm of a norm": (
        lambda self, x: self.b(self.m(self.n(self.a(x)))), convs(m=nn.BatchNorm2d(4)), IMAGE, ["n"],
        {"m": "a folds another BatchNorm already"},
    ),
    "an activation inside": (bulk, convs(n=NormAct(4, nn.SiLU())), IMAGE, ["n"], {}),
    "an activation with parameters inside": (
        bulk, convs(n=NormAct(4, nn.PReLU(4))), IMAGE, ["n"], {"n.act": "PReLU computes in float"},
    ),
    "conv1d": (
        bulk, {"a": nn.Conv1d(3, 4, 3), "b": nn.Conv1d(4, 4, 1), "n": nn.BatchNorm1d(4)}, IMAGE[..., 0], ["n"], {},
    ),
    "transposed": (bulk, convs(a=nn.ConvTranspose2d(3, 4, 2, stride=2)), IMAGE, ["n"], {}),
    "linear": (bulk, {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "n": nn.BatchNorm1d(8)}, ROWS, ["n"], {}),
    "linear, another axis": (
        bulk, {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "n": nn.BatchNorm1d(4)}, TOKENS, [], {"n": BEFORE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_directly_behind_a_layer_is_handed_to_it(case: str) -> None:
    forward, parts, x, handed, left = NORMS[case]
    net = Plain(forward, **parts).eval()
    for name, buffer in net.named_buffers():
        if "running" in name or isinstance(net.n, FrozenBatchNorm2d):
            buffer.copy_(0.5 + draw(*buffer.shape, seed=len(name)).abs())
    model = qat.prepare(net, example_inputs=x)
    assert isinstance(model, fx.GraphModule)
    assert [str(node.kwargs["norm"].target) for node in model.graph.nodes if "norm" in node.kwargs] == handed
    assert noted(model, LEFT_IN_FLOAT) == left
    assert_computes_as(net, model, x)
    assert_close_to_float(net, model, x)


class Softer(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, 100 * self.eps)


def twice(self: Any, x: Tensor) -> Tensor:
    return self.n(self.b(self.n(self.a(x))))


@pytest.mark.parametrize(("forward", "norm"), [(bulk, Softer), (twice, NormAct)])
def test_a_norm_by_function_that_no_module_computes_stays_in_parts(forward: Any, norm: type[NormAct]) -> None:
    net = Plain(forward, **convs(n=norm(4, nn.ReLU()))).eval()
    model = qat.prepare(net, example_inputs=IMAGE)
    assert "in evaluation only" in noted(model, LEFT_IN_FLOAT)["(the model)"]
    assert_computes_as(net, model, IMAGE)
