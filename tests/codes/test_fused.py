"""Training on codes against the same model in plain operations: values, gradients, statistics, what ran on codes."""

import copy
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat import QuantSpec
from qat.codes.graph import FusedGraph
from qat.codes.operators.codes import Codes, carrier_for
from qat.codes.operators.pool import max_pool
from qat.integers.movement import window_of
from qat.kernels import plain_formulas
from qat.kernels.cpu import compiler, onednn
from tests.references.cases_fused import assert_same, images, prepared, results, two_threads
from tests.references.nets import Block, Transformer, between, scores
from tests.references.prepared_case import Plain

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

IMAGES, LAST = images(), images(True)
ROWS = IMAGES.flatten(2)[:, :, :16].contiguous()


class Case(NamedTuple):
    """A model; what runs on codes in its forward, by the names of the Functions; its input and its recipe."""

    net: Callable[[], nn.Module]
    ran: dict[str, int]
    x: Tensor = IMAGES
    recipe: Mapping[str, Any] = MappingProxyType({})


def product(count: int, **others: int) -> dict[str, int]:
    return {"CodesProduct": count, **others}


def moves(self: Any, x: Tensor) -> Tensor:
    """Reshapings of all kinds between layers, questions for sizes, dropouts."""
    x = F.relu(self.conv(x))
    x = self.mix(x.permute(0, 2, 3, 1))
    x = self.drop(F.relu(x))
    assert x.dim() == 4 and x.shape[-1] == 24
    x = torch.flatten(x.transpose(2, 3), 2)
    return self.last(self.flat(x)).unflatten(0, (x.size(0), -1))


def moving(share: float) -> nn.Module:
    layers = {"conv": nn.Conv2d(3, 16, 3), "mix": nn.Linear(16, 24), "last": nn.Linear(24 * 14, 5)}
    return Plain(moves, **layers, drop=nn.Dropout(share), flat=nn.Flatten(0, 1))


def pooled(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *layers, nn.Conv2d(16, 4, 3))


def curved(act: Callable[[Tensor], Tensor]) -> nn.Module:
    layers = {"conv": nn.Conv2d(3, 16, 3, bias=False), "norm": nn.BatchNorm2d(16), "last": nn.Conv2d(16, 5, 3)}
    return Plain(lambda self, x: self.last(self.act(self.norm(self.conv(x)))), **layers, act=act)


def rows(forward: Callable[[Any, Tensor], Tensor], last: int = 16, **others: nn.Module) -> nn.Module:
    layers = {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "last": nn.Linear(last, 5)}
    return Plain(forward, **layers, **others)


def in_place(b: nn.Module, x: Tensor) -> Tensor:
    y = b(x)
    x += y.mean()
    return y.mean((2, 3)) + x.mean()


def pool_and_mean(b: nn.Module, x: Tensor) -> Tensor:
    x = F.max_pool2d(x, 3, 2, padding=1)
    return b(x).mean((2, 3)) + x.mean()  # type: ignore[no-any-return]


def named_otherwise(self: Any, x: Tensor) -> Tensor:
    a, b = F.relu(self.a(x)), F.relu(self.b(x))
    others = self.c(a).mean() + self.c(b).mean()  # for which a and b are quantized
    return self.last(F.relu(self.softmax(self.matmul(a, b)))) + others  # type: ignore[no-any-return]


def of_itself(self: Any, x: Tensor) -> Tensor:
    x = F.relu(self.a(x))
    return self.last(torch.bmm(x, x.mT))  # type: ignore[no-any-return]


def other_shapes(self: Any, x: Tensor) -> Tensor:
    """Matrices without a batch, and a batch with a single matrix: torch.matmul of what the codes stand for."""
    a, b = F.relu(self.a(x)), F.relu(self.b(x[0]))
    return self.last(a @ (b.T @ b))  # type: ignore[no-any-return]


def read_twice(found: Tensor) -> Tensor:
    scaled = found * 0.3
    return torch.softmax(scaled, -1) + scaled.mean()


def affine(**options: Any) -> dict[str, Any]:
    return {"activation": QuantSpec(signed=False, symmetric=False, **options)}


def signed(symmetric: bool) -> dict[str, Any]:
    return {"activation": QuantSpec(signed=True, symmetric=symmetric)}


def tensor_weight(grad_scale: Any = "sample") -> dict[str, Any]:
    return {"weight": QuantSpec(bits=3, granularity="tensor", grad_scale=grad_scale)}


MASK = torch.full((3, 3), -1e4).triu(1)
BLOCK = product(4, MaxPool=1, Decode=1)
CURVE, GELU = product(2, QuantizeCurve=1), product(2, QuantizeCurve=1, Decode=1)
SOFTMAX = product(3, Matmul=2, QuantizeSoftmax=1)

CASES = {
    "relu": Case(Block, BLOCK),
    "relu6": Case(lambda: Block(nn.ReLU6), BLOCK, LAST),
    "hardtanh": Case(lambda: Block(lambda: nn.Hardtanh(-1, 1)), BLOCK),
    "relu in place": Case(lambda: Block(lambda: nn.ReLU(inplace=True)), BLOCK, LAST),
    "signed affine": Case(Block, BLOCK, LAST, {**signed(symmetric=False), **tensor_weight()}),
    "signed symmetric": Case(Block, BLOCK, LAST, {**signed(symmetric=True), **tensor_weight()}),
    "4 bits": Case(Block, BLOCK, LAST, {**affine(bits=4, grad_scale="batch"), **tensor_weight(), "residual_bits": 4}),
    "relative": Case(Block, BLOCK, LAST, {**affine(grad_scale="relative"), **tensor_weight("relative")}),
    "norm without gamma": Case(lambda: Block(affine=False), BLOCK),
    "norm of all steps": Case(lambda: Block(momentum=None), BLOCK),
    "norm without averages": Case(lambda: Block(track_running_stats=False), BLOCK),
    "norm with a large eps": Case(lambda: Block(eps=0.1), BLOCK),
    "linear": Case(
        lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU6(), nn.Linear(48, 3)),
        product(3), torch.randn(40, 20, 64, generator=torch.Generator().manual_seed(0)),
    ),
    "written to": Case(lambda: between(in_place, 8), product(2, Decode=1)),
    "rolled": Case(lambda: between(lambda b, x: b(torch.roll(x, 1, 2))), product(2, Decode=1, Encode=1)),
    "moved": Case(lambda: moving(0.0), product(3)),
    "moved, channels last": Case(lambda: moving(0.0), product(3), LAST),
    "moved, dropped": Case(lambda: moving(0.3), product(2, Decode=1), LAST),
    "pool as a function": Case(lambda: between(pool_and_mean), product(2, MaxPool=1, Decode=1), LAST),
    "pool, no dropout": Case(lambda: pooled(nn.MaxPool2d(2), nn.Dropout(0.0)), product(2, MaxPool=1), LAST),
    "no dropout, pool": Case(lambda: pooled(nn.Dropout(0.0), nn.MaxPool2d(2)), product(2, MaxPool=1), LAST),
    "pool, dropout": Case(lambda: pooled(nn.MaxPool2d(2), nn.Dropout(0.5)), product(1, MaxPool=1, Decode=1), LAST),
    "dropout, pool": Case(lambda: pooled(nn.Dropout(0.5), nn.MaxPool2d(2)), product(1, Decode=1), LAST),
    "gelu": Case(lambda: curved(nn.GELU()), GELU),
    "gelu by tanh as a function": Case(lambda: curved(lambda x: F.gelu(x, approximate="tanh")), GELU, LAST),
    "silu in place": Case(lambda: curved(nn.SiLU(inplace=True)), CURVE, LAST, {"activation": QuantSpec(bits=4)}),
    "hardswish as a function": Case(lambda: curved(lambda x: F.hardswish(x, inplace=True)), CURVE),
    "transformer": Case(Transformer, product(8, Matmul=2, QuantizeSoftmax=1, QuantizeCurve=1)),
    "softmax as a layer": Case(lambda: scores(nn.Softmax(-1)), SOFTMAX, ROWS),
    "softmax as a method, multiplied": Case(lambda: scores(lambda s: (0.3 * s).softmax(dim=-1)), SOFTMAX, ROWS),
    "softmax over axis 2": Case(lambda: scores(lambda s: torch.softmax(torch.mul(s, 0.3), 2)), SOFTMAX, ROWS),
    "softmax, divided, masked": Case(lambda: scores(lambda s: F.softmax(s / 4 + MASK, dim=-1)), SOFTMAX, ROWS),
    "softmax over another axis": Case(
        lambda: scores(lambda s: torch.softmax(s * 0.3, 1)), product(3, Matmul=1, Decode=1), ROWS
    ),
    "softmax with a type": Case(
        lambda: scores(lambda s: torch.softmax(s, -1, dtype=torch.float32)), product(3, Matmul=2), ROWS
    ),
    "scores read twice": Case(lambda: scores(read_twice), product(3, Matmul=1, QuantizeSoftmax=1, Decode=3), ROWS),
    "layers named like functions": Case(
        lambda: rows(named_otherwise, 3, c=nn.Linear(16, 1), softmax=nn.Softmin(-1), matmul=nn.CosineSimilarity(-1)),
        product(5, Decode=2), ROWS,
    ),
    "a tensor times itself": Case(lambda: rows(of_itself, 3), product(2, Matmul=1, Decode=1, Encode=1), ROWS),
    "products of other shapes": Case(lambda: rows(other_shapes), product(3, Decode=6, Encode=1), ROWS),
}  # fmt: skip
"""Active dropouts draw the same where tensors lie in the same order: channels last. What an active one leaves lies on
no grid, and is pooled and read in float."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_plain_operations(name: str, counted: list[str]) -> None:
    net, ran, x, recipe = CASES[name]
    float_model = net().to(memory_format=torch.channels_last) if x is LAST else net()
    model = prepared(float_model, x, qat.QuantRecipe(**recipe))
    assert_same(model, x)
    counted.clear()
    model(x)
    assert Counter(each.removesuffix("Function") for each in counted) == ran


@pytest.mark.parametrize("grad_scale", ["sample", "relative"])
def test_the_scale_of_an_image_learns_without_the_gradient_of_the_image(grad_scale: str) -> None:
    """Read by a convolution, by a linear layer, by both and a sum: each finds its share of the scale's gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.head(F.relu(self.norm(self.conv(x)))).mean((2, 3))
        return y + self.conv(F.relu(self.other(x) + x)).mean()

    layers = {"conv": nn.Conv2d(3, 16, 3, 2, 1), "norm": nn.BatchNorm2d(16), "head": nn.Conv2d(16, 4, 3)}
    ends = Plain(forward, **layers, other=nn.Conv2d(3, 3, 1))
    for net in (ends, nn.Sequential(nn.Flatten(), nn.Linear(768, 8))):
        assert_same(prepared(net, IMAGES, qat.QuantRecipe(**affine(grad_scale=grad_scale))), IMAGES, needs_x=False)


NORMS: dict[str, Callable[[nn.BatchNorm2d], object]] = {  # torch refuses some of them; else its statistics are these
    "of another width": lambda norm: setattr(norm, "__dict__", nn.BatchNorm2d(4).__dict__),
    "expanded": lambda norm: setattr(norm, "running_var", torch.ones(1).expand(8)),
    "float64": lambda norm: setattr(norm, "running_var", torch.ones(8).double()),
    "strided": lambda norm: setattr(norm, "running_var", torch.ones(16)[::2]),
    "one value a channel": lambda norm: None,
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_kernels_cannot_compute_is_torchs(kind: str) -> None:
    x = torch.randn(4, 3, 9, 9)
    model = prepared(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)), x)
    NORMS[kind](model.get_submodule("1"))  # type: ignore[arg-type]
    x = torch.randn(1, 3, 3, 3) if kind == "one value a channel" else x

    def outcome() -> tuple[str, Tensor]:
        try:
            return "", model(x).detach()
        except (RuntimeError, ValueError) as error:
            return str(error), torch.zeros(())

    said, y = outcome()
    with plain_formulas():
        wanted, expected = outcome()
    assert said == wanted and torch.allclose(y, expected, atol=1e-5)


@torch.no_grad()
def drive_scales_out_of_bounds(model: Any) -> None:
    model.conv1_quantizer.scale.fill_(math.nan)
    model.conv2_quantizer.scale.fill_(-1.0)
    scales = model.conv3.weight_quantizer.scale
    scales[0], scales[1] = math.inf, 1e-9


def of_float64(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        quantizer, _, held = name.rpartition(".")
        number = getattr(model.get_submodule(quantizer), held)
        number.data = number.data.double()

    return change


QUANTIZERS = ("input_quantizer", "conv1_quantizer", "conv2.weight_quantizer")
NUMBERS = [f"{name}.{number}" for name in QUANTIZERS for number in ("scale", "smallest_scale")]
CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen statistics": lambda model: (model.bn1.eval(), model.bn2.eval()),
    "an evaluated layer folds its norm": lambda model: (model.conv2.eval(), model.bn2.eval()),
    "scales out of bounds": drive_scales_out_of_bounds,
    **{f"float64: {name}": of_float64(name) for name in ["input_quantizer.zero_point", *NUMBERS]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_steps_as_the_plain_operations(model: Any, change: str) -> None:
    CHANGES[change](model)
    assert_same(model, IMAGES)


def test_nan_is_not_lost(x: Tensor, model: Any) -> None:
    x[0, 0, 0, 0] = math.nan
    y = model(x)
    assert y.isnan().all()
    y.sum().backward()
    assert model.conv1.weight.grad.isnan().any()


def test_a_row_without_a_finite_score_is_nan_as_ever() -> None:
    model = prepared(scores(lambda s: torch.softmax(s + MASK, -1)), ROWS)
    (mask,) = (buffer for buffer in model.buffers() if buffer.shape == MASK.shape)
    mask[0] = -math.inf
    for plain in (True, False):
        assert results(model, ROWS, plain)["y"][:, 0].isnan().all()


def test_active_dropout_takes_probabilities_off_their_grid(counted: list[str]) -> None:
    model = prepared(Transformer(0.2), IMAGES)
    assert torch.isfinite(results(model, IMAGES, plain=False)["y"]).all()
    assert counted.count("MatmulFunction") == counted.count("QuantizeSoftmaxFunction") == 1


def test_nothing_else_is_kept_for_backward_than_in_float() -> None:
    def saved(model: nn.Module, x: Tensor) -> int:
        kept: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            kept[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(x).sum()
        mine = {p.data_ptr() for p in model.parameters()}
        return sum(size for place, size in kept.items() if place not in mine)

    x = images(True, 16, 32)
    model = Block().to(memory_format=torch.channels_last).train()
    in_float = saved(model, x)
    quantized = prepared(model, x)
    with plain_formulas():
        assert saved(quantized, x) > in_float * 1.1
    assert saved(quantized, x) < in_float


def test_hooks_are_called(model: Any) -> None:
    seen: set[str] = set()
    for name in ("conv1", "conv1_quantizer", "bn2", "act", "pool", "conv2.weight_quantizer", "conv3_quantizer"):
        found = dict(model.named_modules()).get(name)
        if found is not None:
            found.register_forward_hook(lambda *_, name=name: seen.add(name))
    expected, plain_calls = results(model, IMAGES, plain=True), {*seen}
    seen.clear()
    fast = results(model, IMAGES, plain=False)
    assert seen == plain_calls and len(plain_calls) >= 5
    assert torch.allclose(expected["y"], fast["y"], rtol=1e-4)


def test_the_model_stays_what_it_was(model: Any) -> None:
    model(IMAGES)
    keys = list(model.state_dict())
    again = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded).__mro__[1] is type(model).__mro__[1] is FusedGraph and loaded._derive() is not None
    assert list(again.state_dict()) == keys == list(loaded.state_dict())
    assert torch.equal(again(IMAGES), loaded(IMAGES))
    assert isinstance(model.eval()(IMAGES), Tensor) and isinstance(model, torch.fx.GraphModule)
    model.train()
    output = next(iter(reversed(model.graph.nodes)))
    with model.graph.inserting_before(output):
        doubled = model.graph.call_function(torch.mul, (output.args[0], 2.0))
    output.args = (doubled,)
    before = again(IMAGES)
    model.recompile()
    assert torch.allclose(model(IMAGES), before * 2)


def test_a_parameter_that_is_replaced_is_the_one_that_runs(model: Any) -> None:
    before = model(IMAGES)
    after = torch.func.functional_call(model, {"head.bias": model.head.bias * 1.5}, (IMAGES,))
    assert torch.allclose(after - before, model.head.bias * 0.5, atol=1e-5)


def test_second_derivatives_are_refused_and_plain_formulas_have_them(model: Any) -> None:
    weight = model.conv1.weight
    for loss in (model(IMAGES).square().sum(), model(IMAGES).sum()):  # of the second no gradient would need a gradient
        with pytest.raises(RuntimeError, match="has first derivatives only"):
            torch.autograd.grad(loss, weight, create_graph=True)
    with plain_formulas():
        (first,) = torch.autograd.grad(model(IMAGES).square().sum(), weight, create_graph=True)
        first.square().sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_the_default_dtype_is_not_the_kernels() -> None:
    x = torch.randn(600, 64)
    model = prepared(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)), x)
    expected, exact = model(x), {kind: onednn.are_exact(kind) for kind in onednn.KINDS}
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(model(x), expected)
        onednn._are_exact.cache_clear()
        assert {kind: onednn.are_exact(kind) for kind in onednn.KINDS} == exact
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_window_that_lies_in_the_padding_is_left_to_torch() -> None:
    codes = torch.full((1, 1, 1, 1), 7, dtype=torch.uint8)
    pool = nn.MaxPool2d(2, padding=1, dilation=2)
    window = window_of(pool)
    assert window is not None and window_of(nn.MaxPool2d(2, return_indices=True)) is None
    y = max_pool(Codes(carrier_for(codes, torch.empty(())), codes, torch.tensor([0.5, 3.0])), window, pool)
    assert isinstance(y, Tensor) and torch.equal(y, pool((codes.float() - 3) * 0.5))
