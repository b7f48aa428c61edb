"""Where quantizers go: one per tensor, at the end of its producer; which tensors get none."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from benchmarks.work import integer_work
from tests.references import prepared_case as checks
from tests.references.prepared_case import Net, Plain, activation_quantizers, calls, draw, prepared_near


def test_one_quantizer_a_tensor_at_the_end_of_its_producer() -> None:
    model = qat.prepare(Net(), example_inputs=torch.randn(1, 3, 8, 8))
    # Each runs once; the max pool and the flatten pass the grid on; the logits stay in float.
    assert calls(model) == [
        "input_quantizer", "stem", "stem_quantizer", "pool", "block.conv1", "block.relu", "block.conv1_quantizer",
        "block.conv2", "block.conv2_quantizer", "block.relu", "block.add_quantizer", "adaptive_avg_pool2d_quantizer",
        "fc",
    ]  # fmt: skip
    assert len(activation_quantizers(model)) == 6
    grids = {n.target: n.kwargs["input_quantizer"].target for n in model.graph.nodes if "input_quantizer" in n.kwargs}
    assert grids == {
        "stem": "input_quantizer",
        "block.conv1": "stem_quantizer",
        "block.conv2": "block.conv1_quantizer",
        "fc": "adaptive_avg_pool2d_quantizer",
    }


def layers(**others: nn.Module) -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), **others}


def convs(**others: nn.Module) -> dict[str, nn.Module]:
    return {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1), **others}


def index_qkv(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).reshape(2, 5, 3, 8).permute(2, 0, 1, 3)
    return self.b((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def pick(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(y.gather(1, x.argsort(1)) + y[torch.tensor([1, 0, 3, 2])])


FLAT, IMAGE, TOKENS = draw(4, 8), draw(2, 3, 8, 8), draw(2, 5, 8)

# Forward, parts, input, and the resulting activation quantizers.
PLACES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor, set[str]]] = {
    "conv, GELU": (lambda self, x: self.b(F.gelu(self.a(x))), convs(), IMAGE, {"input", "a", "gelu"}),
    "conv, ReLU": (lambda self, x: self.b(F.relu(self.a(x))), convs(), IMAGE, {"input", "a"}),
    "conv, ReLU6 in place": (lambda self, x: self.b(F.relu6(self.a(x), True)), convs(), IMAGE, {"input", "a"}),
    "conv, dropout, max pool, ReLU": (lambda self, x: self.b(F.relu(F.max_pool2d(self.d(self.a(x)), 2))),
                                      convs(d=nn.Dropout2d()), IMAGE, {"input", "a"}),
    "conv, dropout in place, ReLU": (lambda self, x: self.b(F.relu(self.d(self.a(x)))), convs(d=nn.Dropout(0.5, True)),
                                     IMAGE, {"input", "d"}),
    "conv, alpha dropout, ReLU": (lambda self, x: self.b(F.relu(self.d(self.a(x)))), convs(d=nn.FeatureAlphaDropout()),
                                  IMAGE, {"input", "d"}),
    "conv, norm, view, ReLU in place": (lambda self, x: self.b(F.relu_(self.n(self.a(x)).mT)),
                                        convs(n=nn.BatchNorm2d(4)), IMAGE, {"input", "a"}),
    "conv, margins that no maximum chooses": (
        lambda self, x: self.b(F.max_pool2d(F.pad(self.a(x), (1, 1), value=-torch.inf), 2)), convs(), IMAGE,
        {"input", "a"},
    ),
    "conv, max pool, clamp at 0": (lambda self, x: self.b(F.max_pool2d(self.a(x), 2).clamp(min=0)), convs(), IMAGE,
                                   {"input", "a"}),
    "conv is the output": (lambda self, x: self.a(x), convs(), IMAGE, {"input"}),
    "conv, ReLU is the output": (lambda self, x: F.relu(self.a(x)), convs(), IMAGE, {"input"}),
    "conv, sigmoid is the output": (lambda self, x: self.a(x).sigmoid(), convs(), IMAGE, {"input", "a"}),
    "linear, GELU": (lambda self, x: self.b(F.gelu(self.a(x))), layers(), FLAT, {"input", "gelu"}),
    "sum": (lambda self, x: self.b(self.a(x) + x), layers(), FLAT, {"input", "a", "add"}),
    "sum that a norm reads": (lambda self, x: self.b(self.n(self.a(x) + x)), layers(n=nn.LayerNorm(8)), FLAT,
                              {"input", "n"}),
    "sum that is the output": (lambda self, x: self.b(x) + self.a(x), layers(), FLAT, {"input"}),
    "position embedding": (lambda self, x: self.b(self.a(x) + self.p), layers(p=nn.Parameter(torch.zeros(4, 8))), FLAT,
                           {"input", "add"}),
    "product with a parameter": (lambda self, x: self.b(x @ self.p), layers(p=nn.Parameter(torch.zeros(8, 8))), FLAT,
                                 {"input", "p", "matmul"}),
    "product": (lambda self, x: self.b(torch.bmm(self.a(x).mT, x)), layers(), TOKENS, {"input", "a", "bmm"}),
    "product that is the output": (lambda self, x: self.a(x) @ x.mT, layers(), TOKENS, {"input", "a"}),
    "cat": (lambda self, x: self.b(torch.cat([self.a(x), x], 1)), layers(b=nn.Linear(16, 8)), FLAT,
            {"input", "a", "cat"}),
    "average": (lambda self, x: self.b(self.a(x).mean(1)), layers(), TOKENS, {"input", "mean"}),
    "pool, interpolate, pad": (
        lambda self, x: self.b(F.pad(F.interpolate(F.avg_pool2d(self.a(x), 2), scale_factor=2), (1, 1))), convs(),
        IMAGE, {"input", "a", "interpolate"},
    ),
    "padding with a number": (lambda self, x: self.b(F.pad(self.a(x), (1, 1), value=3.0)), convs(), IMAGE,
                              {"input", "a", "pad"}),
    "moves": (lambda self, x: self.b(self.a(x).permute(2, 0, 1).flip(0).flatten(1)[:, :8].reshape(8, 8)), layers(),
              TOKENS, {"input", "flip"}),
    "a chunk": (lambda self, x: self.b(self.a(x).chunk(2, 1)[1]), layers(b=nn.Linear(4, 8)), FLAT, {"input", "a"}),
    "q, k and v of one projection": (index_qkv, {"qkv": nn.Linear(8, 24), "b": nn.Linear(8, 8)}, TOKENS,
                                     {"input", "getitem", "getitem_1", "getitem_2", "softmax", "matmul"}),
    "indices and gathered values": (pick, layers(), FLAT, {"input", "a", "gather", "add"}),
    "look-up": (lambda self, x: self.b(self.a(x)), layers(a=nn.Embedding(9, 8)), torch.arange(8).view(2, 4), {"a"}),
    "look-ups added": (lambda self, x: self.b(self.a(x) + self.p(torch.arange(x.size(1)))),
                       layers(a=nn.Embedding(9, 8), p=nn.Embedding(4, 8)), torch.arange(8).view(2, 4),
                       {"a", "p", "add"}),
    "integers of a mask": (lambda self, x: self.b(x.float() * (x > 3)), layers(), torch.arange(16).view(2, 8), {"mul"}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_operands_of_integer_work_have_grids_and_nothing_else(case: str) -> None:
    forward, parts, x, names = PLACES[case]
    model = prepared_near(Plain(forward, **parts).eval(), x)
    assert {name.replace("_quantizer", "") for name in activation_quantizers(model)} == names
    assert integer_work(model, x).share == 1.0


def bits_of(model: nn.Module) -> dict[str, int]:
    return {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}


def with_grid_of_conv1(**grid: Any) -> Any:
    """The residual add reads that tensor too."""
    recipe = qat.QuantRecipe(overrides={"block.conv1": {"activation": grid}})
    return qat.prepare(Net(), recipe, torch.randn(2, 3, 8, 8))


def test_a_reader_that_does_not_get_its_grid_is_named() -> None:
    lines = qat.summary(with_grid_of_conv1(init="minmax")).splitlines()
    line = next(line for line in lines if line.startswith("stem_quantizer"))
    assert "shared with a reader that asked for uint8 affine per tensor; not calibrated" in line


def test_a_reader_of_fewer_bits_has_a_grid_behind_the_shared_one() -> None:
    model = with_grid_of_conv1(bits=4)
    assert {name for name, width in bits_of(model).items() if width == 4} == {"stem_quantizer_4_bits"}
    narrow = next(node for node in model.graph.nodes if node.target == "stem_quantizer_4_bits")
    assert narrow.args[0].target == "pool" and narrow.args[0].args[0].target == "stem_quantizer"
    assert [user.target for user in narrow.users if user.op == "call_module"] == ["block.conv1"]
    assert "shared with" not in qat.summary(model)


def test_residual_bits_are_those_of_what_sums_and_averages_read() -> None:
    # Float operations read it too: here a SiLU, and the sum whose result nothing reads as integers.
    def gated(self: Any, x: Tensor) -> Tensor:
        y = F.silu(self.stem(x))
        z = F.relu(self.mid(y) + y)
        return self.end(z) + z

    net = Plain(gated, stem=nn.Conv2d(3, 4, 3), mid=nn.Conv2d(4, 4, 1), end=nn.Conv2d(4, 4, 1))
    model = qat.prepare(net, qat.QuantRecipe({"bits": 2}, {"bits": 2}), torch.randn(2, 3, 8, 8))
    assert bits_of(model) == {
        "input_quantizer": 2,
        "stem_quantizer": 8,  # the SiLU reads it
        "silu_quantizer": 8,  # the first sum
        "silu_quantizer_2_bits": 2,
        "mid_quantizer": 8,
        "add_quantizer": 8,  # the last sum, which is the model's output and stays in float
        "add_quantizer_2_bits": 2,
        "end_quantizer": 8,
    }


def test_shape_arithmetic_is_not_quantized() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x)
        rows = x.shape[0] * 1
        return self.fc(x.view(rows, x.size(1) * x.size(2) * x.size(3)))

    net = Plain(forward, conv=nn.Conv2d(2, 2, 1), fc=nn.Linear(8, 2))
    model = prepared_near(net, draw(3, 2, 2, 2))
    assert sorted(activation_quantizers(model)) == ["conv_quantizer", "input_quantizer"]
    checks.assert_computes_as(net, model, draw(5, 2, 2, 2))  # another batch


def test_activations_in_place_read_the_grids_before_them() -> None:
    """A quantizer of a tensor that an in-place activation changes, and that the model returns, is read."""

    def features(self: Any, x: Tensor) -> OrderedDict[str, Tensor]:
        first = self.act(self.n(self.a(x)))
        second = self.act(self.b(first))
        return OrderedDict(first=first, second=second, third=self.c(second))

    parts = {name: nn.Conv2d(width, 4, 1) for name, width in (("a", 3), ("b", 4), ("c", 4))}
    net = Plain(features, **parts, n=nn.BatchNorm2d(4), act=nn.Hardswish(inplace=True))
    model = qat.prepare(net, example_inputs=torch.randn(2, 3, 4, 4))
    calls = [node for node in model.graph.nodes if "quantizer" in str(node.target)]
    assert {"a_quantizer", "b_quantizer"} <= {str(node.target) for node in calls}
    assert all(node.users for node in calls)
