"""Where quantizers go: one per tensor, at the end of its producer; which tensors get none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation

import qat
from benchmarks.work import integer_work
from qat.preparation.report import LEFT_IN_FLOAT, noted
from tests.references.prepared_case import (
    Net,
    Plain,
    activation_quantizers,
    assert_close_to_float,
    assert_computes_as,
    calls,
    draw,
)


def test_one_quantizer_a_tensor_placed_at_the_end_of_its_producer() -> None:
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
    "conv is the output": (lambda self, x: self.a(x), convs(), IMAGE, {"input"}),
    "conv, ReLU is the output": (lambda self, x: F.relu(self.a(x)), convs(), IMAGE, {"input"}),
    "conv, sigmoid is the output": (lambda self, x: self.a(x).sigmoid(), convs(), IMAGE, {"input", "a"}),
    "linear, GELU": (lambda self, x: self.b(F.gelu(self.a(x))), layers(), FLAT, {"input", "gelu"}),
    "sum": (lambda self, x: self.b(self.a(x) + x), layers(), FLAT, {"input", "a", "add"}),
    "sum that a norm reads": (
        lambda self, x: self.b(self.n(self.a(x) + x)), layers(n=nn.LayerNorm(8)), FLAT, {"input", "n"},
    ),
    "sum that is the output": (lambda self, x: self.b(x) + self.a(x), layers(), FLAT, {"input"}),
    "sum with a number": (lambda self, x: self.b(self.a(x) + 3), layers(), FLAT, {"input", "add"}),
    "sum with itself": (lambda self, x: (lambda y: self.b(y + y))(self.a(x)), layers(), FLAT, {"input", "add"}),
    "position embedding": (
        lambda self, x: self.b(self.a(x) + self.p), layers(p=nn.Parameter(torch.zeros(4, 8))), FLAT, {"input", "add"},
    ),
    "layer scale": (
        lambda self, x: self.b(self.a(x) * self.p), layers(p=nn.Parameter(torch.zeros(8))), FLAT, {"input", "mul"},
    ),
    "product with a parameter": (
        lambda self, x: self.b(x @ self.p), layers(p=nn.Parameter(torch.zeros(8, 8))), FLAT, {"input", "p", "matmul"},
    ),
    "product": (
        lambda self, x: self.b(torch.bmm(self.a(x).mT, x)), layers(), TOKENS, {"input", "a", "bmm"},
    ),
    "einsum": (
        lambda self, x: self.b(torch.einsum("bij,bik->bjk", self.a(x), x)), layers(), TOKENS, {"input", "a", "einsum"},
    ),
    "product that is the output": (lambda self, x: self.a(x) @ x.mT, layers(), TOKENS, {"input", "a"}),
    "cat": (
        lambda self, x: self.b(torch.cat([self.a(x), x], 1)), layers(b=nn.Linear(16, 8)), FLAT, {"input", "a", "cat"},
    ),
    "stack": (
        lambda self, x: self.b(torch.stack([self.a(x), x], 1)), layers(), FLAT, {"input", "a", "stack"},
    ),
    "average": (lambda self, x: self.b(self.a(x).mean(1)), layers(), TOKENS, {"input", "mean"}),
    "average that is the output": (lambda self, x: self.a(x).mean(1), layers(), TOKENS, {"input"}),
    "pool, interpolate, pad": (
        lambda self, x: self.b(F.pad(F.interpolate(F.avg_pool2d(self.a(x), 2), scale_factor=2), (1, 1))), convs(),
        IMAGE, {"input", "a", "interpolate"},
    ),
    "padding with a number": (
        lambda self, x: self.b(F.pad(self.a(x), (1, 1), value=3.0)), convs(), IMAGE, {"input", "a", "pad"},
    ),
    "moves": (
        lambda self, x: self.b(self.a(x).permute(2, 0, 1).flip(0).flatten(1)[:, :8].reshape(8, 8)), layers(), TOKENS,
        {"input", "flip"},
    ),
    "a chunk": (lambda self, x: self.b(self.a(x).chunk(2, 1)[1]), layers(b=nn.Linear(4, 8)), FLAT, {"input", "a"}),
    "q, k and v of one projection": (
        index_qkv, {"qkv": nn.Linear(8, 24), "b": nn.Linear(8, 8)}, TOKENS,
        {"input", "getitem", "getitem_1", "getitem_2", "softmax", "matmul"},
    ),
    "masks": (
        lambda self, x: self.b(self.a(x).masked_fill(x > 0, 0.0)), layers(), FLAT, {"input", "masked_fill"},
    ),
    "where": (lambda self, x: self.b(torch.where(x > 0, self.a(x), x)), layers(), FLAT, {"input", "where"}),
    "squeeze and excitation": (
        lambda self, x: self.b(self.se(self.a(x))), convs(se=SqueezeExcitation(4, 2)), IMAGE,
        {"input", "a", "se.avgpool", "se.fc1", "se.fc2", "se.scale_activation", "se.mul"},
    ),
    "indices and gathered values": (pick, layers(), FLAT, {"input", "a", "gather", "add"}),
    "look-up": (
        lambda self, x: self.b(self.a(x)), layers(a=nn.Embedding(9, 8)), torch.arange(8).view(2, 4), {"a"},
    ),
    "look-ups added": (
        lambda self, x: self.b(self.a(x) + self.p(torch.arange(x.size(1)))),
        layers(a=nn.Embedding(9, 8), p=nn.Embedding(4, 8)), torch.arange(8).view(2, 4), {"a", "p", "add"},
    ),
    "integers of a mask": (
        lambda self, x: self.b(x.float() * (x > 3)), layers(), torch.arange(16).view(2, 8), {"mul"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_every_operand_of_integer_work_has_a_grid_and_nothing_else(case: str) -> None:
    forward, parts, x, names = PLACES[case]
    net = Plain(forward, **parts).eval()
    model = qat.prepare(net, example_inputs=x)
    assert {name.replace("_quantizer", "") for name in activation_quantizers(model)} == names
    assert_computes_as(net, model, x)
    assert_close_to_float(net, model, x)
    assert integer_work(model, x).share == 1.0


class EncoderBlock(nn.Module):
    """A pre-norm block of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale * self.attention(y, y, y, need_weights=False)[0]
        return x + self.scale * self.mlp(self.norm2(x))


def test_the_residual_stream_of_a_transformer_stays_in_float() -> None:
    net = nn.Sequential(EncoderBlock(), EncoderBlock(), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    model = qat.prepare(net, example_inputs=TOKENS)
    names = activation_quantizers(model)
    # Both norms and the MLP's GELU; of attention q, k, v, the probabilities and the context; and the last norm.
    assert len(names) == 2 * (2 + 1 + 5) + 1
    assert not any(name.rpartition(".")[2].startswith(("add", "mul", "scale")) for name in names)
    assert integer_work(model, TOKENS).share == 1.0
    assert_computes_as(net, model, TOKENS)
    assert_close_to_float(net, model, TOKENS)


def test_overrides_choose_the_grid_of_a_layers_input() -> None:
    eight = {"weight": {"bits": 8}, "activation": {"bits": 8}}
    recipe = qat.QuantRecipe(
        weight=qat.QuantSpec(bits=4),
        activation=qat.QuantSpec(bits=4, signed=False, symmetric=False),
        overrides={"stem": eight, "fc": eight},
        residual_bits=4,
    )
    model = qat.prepare(Net(), recipe)
    bits = {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}
    assert bits == {
        "input_quantizer": 8,
        "stem_quantizer": 4,
        "block.conv1_quantizer": 4,
        "block.conv2_quantizer": 4,
        "block.add_quantizer": 4,
        "adaptive_avg_pool2d_quantizer": 8,
    }
    assert model.fc.weight_quantizer.spec.bits == 8 and model.block.conv1.weight_quantizer.spec.bits == 4


def test_a_reader_that_does_not_get_its_grid_is_named() -> None:
    recipe = qat.QuantRecipe(overrides={"block.conv1": {"activation": {"init": "minmax"}}})  # the add reads it too
    model = qat.prepare(Net(), recipe)
    line = next(line for line in qat.summary(model).splitlines() if line.startswith("stem_quantizer"))
    assert "shared with a reader that asked for uint8 affine per tensor; not calibrated" in line


def test_a_reader_of_fewer_bits_has_a_grid_behind_the_shared_one() -> None:
    recipe = qat.QuantRecipe(overrides={"block.conv1": {"activation": {"bits": 4}}})  # the residual add reads it too
    model = qat.prepare(Net(), recipe, torch.randn(2, 3, 8, 8))
    bits = {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}
    assert {name for name, width in bits.items() if width == 4} == {"stem_quantizer_4_bits"}
    narrow = next(node for node in model.graph.nodes if node.target == "stem_quantizer_4_bits")
    assert narrow.args[0].target == "pool" and narrow.args[0].args[0].target == "stem_quantizer"
    assert [user.target for user in narrow.users if user.op == "call_module"] == ["block.conv1"]
    assert "shared with" not in qat.summary(model)


def test_residual_bits_are_those_of_what_sums_and_averages_read() -> None:
    recipe = qat.QuantRecipe({"bits": 2}, {"bits": 2}, first_bits=8, last_bits=8, residual_bits=6)
    model = qat.prepare(Net(), recipe, torch.randn(2, 3, 8, 8))
    bits = {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}
    assert bits == {
        "input_quantizer": 8,
        "stem_quantizer": 6,  # the sum and the first convolution of the block read it
        "stem_quantizer_2_bits": 2,
        "block.conv1_quantizer": 2,
        "block.conv2_quantizer": 6,
        "block.add_quantizer": 6,  # the pool reads it
        "adaptive_avg_pool2d_quantizer": 8,
    }

    # Float operations read it too: here a SiLU, and the sum whose result nothing reads as integers.
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.mid, self.end = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.silu(self.stem(x))
            z = nn.functional.relu(self.mid(y) + y)
            return self.end(z) + z

    model = qat.prepare(Gated(), qat.QuantRecipe({"bits": 2}, {"bits": 2}), torch.randn(2, 3, 8, 8))
    bits = {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}
    assert bits == {
        "input_quantizer": 2,
        "stem_quantizer": 8,  # the SiLU reads it
        "silu_quantizer": 8,  # the first sum
        "silu_quantizer_2_bits": 2,
        "mid_quantizer": 8,
        "add_quantizer": 8,  # the last sum, which is the model's output and stays in float
        "add_quantizer_2_bits": 2,
        "end_quantizer": 8,
    }
    # Left out, they are at least 8: the target's own grid, whatever rule the layers read.
    for given, found in (({"bits": 2, "rule": "pact"}, 8), ({"bits": 8}, 8), ({"bits": 16}, 16)):
        recipe = qat.QuantRecipe(activation=given)
        assert recipe.residual.bits == found and (recipe.residual.rule == "lsq" or recipe.residual == recipe.activation)
    assert qat.QuantRecipe(activation={"bits": 2}, residual_bits=2).residual.bits == 2
    for wrong in (0, 17, 2.5, True):
        with pytest.raises(ValueError, match=f"residual_bits must be a whole number from 1 to 16 or None, got {wrong}"):
            qat.QuantRecipe(residual_bits=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("example_inputs", [torch.randn(3, 2, 2, 2), None])
def test_shape_arithmetic_is_not_quantized(example_inputs: Tensor | None) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x)
        rows = x.shape[0] * 1
        return self.fc(x.view(rows, x.size(1) * x.size(2) * x.size(3)))

    net = Plain(forward, conv=nn.Conv2d(2, 2, 1), fc=nn.Linear(8, 2))
    model = qat.prepare(net, example_inputs=example_inputs)
    assert sorted(activation_quantizers(model)) == ["conv_quantizer", "input_quantizer"]
    assert_computes_as(net, model, draw(5, 2, 2, 2))  # another batch


def test_products_that_have_no_integer_form_here_are_named() -> None:
    net = Plain(lambda self, x: self.b(torch.baddbmm(x, self.a(x), x.mT @ x)), **layers()).eval()
    model = qat.prepare(net, example_inputs=TOKENS)
    assert_computes_as(net, model, TOKENS)
    in_float = integer_work(model, TOKENS).in_float
    # If integer_work counts float work, the reasons must name it.
    assert not in_float or any(
        "baddbmm" in name or "baddbmm" in why for name, why in noted(model, LEFT_IN_FLOAT).items()
    )
