"""Training on codes against the same model in plain operations: values, gradients, statistics, when it steps back."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.codes.graph import FusedGraph
from qat.codes.operators.quantize import DecodeFunction
from qat.kernels import plain_formulas
from qat.kernels.cpu import compiler, onednn
from tests.references.cases_fused import Block, assert_same, images, prepared, results, two_threads
from tests.references.prepared_case import Plain

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


@pytest.fixture
def model(x: Tensor) -> nn.Module:
    return prepared(Block(), x)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, lambda: nn.Hardtanh(-1, 1), lambda: nn.ReLU(inplace=True)])
def test_a_step_is_that_of_the_plain_operations(
    act: Callable[[], nn.Module], channels_last: bool, counted: list[str]
) -> None:
    x = images(channels_last)
    model = Block(act)
    assert_same(prepared(model.to(memory_format=torch.channels_last) if channels_last else model, x), x)
    assert counted.count("CodesProductFunction") == 4 * counted.count("MaxPoolFunction") > 0


@pytest.mark.parametrize("grad_scale", ["sample", "relative"])
def test_the_scale_of_an_image_learns_without_the_gradient_of_the_image(grad_scale: str) -> None:
    """Read by a convolution, by a linear layer, by both and a sum: each finds its share of the scale's gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.head(F.relu(self.norm(self.conv(x)))).mean((2, 3))
        return y + self.conv(F.relu(self.other(x) + x)).mean()

    layers = {"conv": nn.Conv2d(3, 16, 3, 2, 1), "norm": nn.BatchNorm2d(16), "head": nn.Conv2d(16, 4, 3)}
    ends = Plain(forward, **layers, other=nn.Conv2d(3, 3, 1))
    activation = qat.QuantSpec(signed=False, symmetric=False, grad_scale=grad_scale)  # type: ignore[arg-type]
    for model in (ends, Block(), nn.Sequential(nn.Flatten(), nn.Linear(768, 8))):
        assert_same(prepared(model, images(), qat.QuantRecipe(activation=activation)), images(), needs_x=False)


SPECS = {
    "signed affine": qat.QuantSpec(signed=True, symmetric=False),
    "signed symmetric": qat.QuantSpec(signed=True, symmetric=True),
    "4 bits": qat.QuantSpec(bits=4, signed=False, symmetric=False, grad_scale="batch"),
    "relative": qat.QuantSpec(signed=False, symmetric=False, grad_scale="relative"),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_grid_that_fits_eight_bits(name: str, counted: list[str]) -> None:
    x = images(True)
    grad_scale: Any = "relative" if name == "relative" else "sample"
    weight = qat.QuantSpec(bits=3, granularity="tensor", grad_scale=grad_scale)
    recipe = qat.QuantRecipe(weight, SPECS[name], residual_bits=4 if name == "4 bits" else None)
    assert_same(prepared(Block(), x, recipe), x)
    assert counted.count("CodesProductFunction") == 4 * counted.count("MaxPoolFunction") > 0


@pytest.mark.parametrize("norm", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}])
def test_every_batch_norm(norm: dict[str, object]) -> None:
    assert_same(prepared(Block(**norm), images()), images())


NORMS: dict[str, Callable[[nn.BatchNorm2d], object]] = {  # torch refuses some of them; else its statistics are these
    "of another width": lambda norm: setattr(norm, "__dict__", nn.BatchNorm2d(4).__dict__),
    "expanded": lambda norm: setattr(norm, "running_var", torch.ones(1).expand(8)),
    "float64": lambda norm: setattr(norm, "running_var", torch.ones(8).double()),
    "strided": lambda norm: setattr(norm, "running_var", torch.ones(16)[::2]),
    "one value a channel": lambda norm: None,
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_kernels_cannot_compute_is_torchs(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 3, 9, 9)
    model = prepared(net, x)
    NORMS[kind](model.get_submodule("1"))  # type: ignore[arg-type]
    x = torch.randn(1, 3, 3, 3) if kind == "one value a channel" else x

    def outcome() -> tuple[str, Tensor]:
        torch.manual_seed(0)
        try:
            return "", model(x).detach()
        except (RuntimeError, ValueError) as error:
            return str(error), torch.zeros(())

    said, y = outcome()
    with plain_formulas():
        expected = outcome()
    assert said == expected[0] and torch.allclose(y, expected[1], atol=1e-5)


def test_frozen_statistics(x: Tensor, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    before = model.get_submodule("bn1").running_mean.clone()  # type: ignore[operator, union-attr]
    assert_same(model, x)
    model(x)
    assert torch.equal(model.get_submodule("bn1").running_mean, before)  # type: ignore[arg-type]


def test_scales_that_an_optimizer_drove_out_of_bounds(x: Tensor, model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("conv1_quantizer.scale").fill_(float("nan"))
        model.get_parameter("conv2_quantizer.scale").fill_(-1.0)
        weights = model.get_parameter("conv3.weight_quantizer.scale")
        weights[0], weights[1] = float("inf"), 1e-9
    assert_same(model, x)


def test_a_layer_in_evaluation_folds_its_norm_as_ever(x: Tensor) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model = prepared(net, x)
    for name in ("3", "4"):
        model.get_submodule(name).eval()
    with plain_formulas():
        expected = copy.deepcopy(model)(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_nan_is_not_lost(x: Tensor, model: nn.Module) -> None:
    x[0, 0, 0, 0] = float("nan")
    y = model(x)
    assert y.isnan().all()
    y.sum().backward()
    assert model.get_parameter("conv1.weight").grad.isnan().any()  # type: ignore[union-attr]


def test_nothing_else_is_kept_for_backward_than_in_float() -> None:

    def saved(model: nn.Module, x: Tensor) -> int:
        kept: dict[int, int] = {}
        mine = {p.data_ptr() for p in model.parameters()}

        def note(t: Tensor) -> Tensor:
            if t.data_ptr() not in mine:
                kept[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(x).sum()
        return sum(kept.values())

    x = images(True, 16, 32)
    model = Block().to(memory_format=torch.channels_last).train()
    in_float = saved(model, x)
    quantized = prepared(model, x)
    with plain_formulas():
        assert saved(quantized, x) > in_float * 1.1
    assert saved(quantized, x) < in_float


def test_hooks_are_called(x: Tensor, model: nn.Module) -> None:
    seen: list[str] = []
    for name in ("conv1", "conv1_quantizer", "bn2", "act", "pool", "conv2.weight_quantizer", "conv3_quantizer"):
        found = dict(model.named_modules()).get(name)
        if found is not None:
            found.register_forward_hook(lambda *_, name=name: seen.append(name))
    expected = results(model, x, plain=True)
    plain_calls = sorted(set(seen))
    seen.clear()
    fast = results(model, x, plain=False)
    assert sorted(set(seen)) == plain_calls and len(plain_calls) >= 5
    assert torch.allclose(expected["y"], fast["y"], rtol=1e-4)


def test_the_model_stays_what_it_was(x: Tensor, model: nn.Module) -> None:
    model(x)
    keys = list(model.state_dict())
    again = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded).__mro__[1] is type(model).__mro__[1] is FusedGraph and loaded._derive() is not None
    assert list(again.state_dict()) == keys == list(loaded.state_dict())
    assert torch.equal(again(x), loaded(x))
    assert isinstance(model.eval()(x), Tensor)
    assert isinstance(model, torch.fx.GraphModule)
    model.train()
    output = next(iter(reversed(model.graph.nodes)))
    with model.graph.inserting_before(output):
        doubled = model.graph.call_function(torch.mul, (output.args[0], 2.0))
    output.args = (doubled,)
    before = again(x)
    model.recompile()
    assert torch.allclose(model(x), before * 2)


def test_a_parameter_that_is_replaced_is_the_one_that_runs(x: Tensor, model: nn.Module) -> None:
    before = model(x)
    replaced = {name: p * 1.5 for name, p in model.named_parameters() if name == "head.bias"}
    after = torch.func.functional_call(model, replaced, (x,))
    assert torch.allclose(after - before, model.get_parameter("head.bias") * 0.5, atol=1e-5)


def test_a_tensor_that_is_written_to_is_not_held_as_codes(x: Tensor) -> None:
    def writes(self: Any, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        y = self.b(x)
        x += y.mean()
        return y.mean((2, 3)) + x.mean()

    assert_same(prepared(Plain(writes, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)), x), x)


def test_second_derivatives_are_refused_and_plain_formulas_have_them(x: Tensor, model: nn.Module) -> None:
    weight = model.get_parameter("conv1.weight")
    for loss in (model(x).square().sum(), model(x).sum()):  # of the second one no gradient would need a gradient
        with pytest.raises(RuntimeError, match="has first derivatives only"):
            torch.autograd.grad(loss, weight, create_graph=True)
    with plain_formulas():
        (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
        first.square().sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_a_linear_layer_reads_rows(counted: list[str]) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU6(), nn.Linear(48, 3))
    x = torch.randn(40, 20, 64)
    assert_same(prepared(model, x), x)
    assert counted and counted.count("CodesProductFunction") == len(counted)


@pytest.mark.parametrize(
    "name",
    [
        "input_quantizer.zero_point",
        *(f"{name}.scale" for name in ("input_quantizer", "conv1_quantizer", "conv2.weight_quantizer")),
        *(f"{name}.smallest_scale" for name in ("input_quantizer", "conv1_quantizer", "conv2.weight_quantizer")),
    ],
)
def test_numbers_that_are_no_float32_are_not_read_as_such(x: Tensor, model: nn.Module, name: str) -> None:
    quantizer, _, held = name.rpartition(".")
    number = getattr(model.get_submodule(quantizer), held)
    number.data = number.data.double()
    assert_same(model, x)


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


def moves(self: Any, x: Tensor) -> Tensor:
    """Reshapings of all kinds between layers, questions for sizes, dropouts."""
    x = F.relu(self.conv(x))
    x = self.mix(x.permute(0, 2, 3, 1))
    x = self.drop(F.relu(x))
    assert x.dim() == 4 and x.shape[-1] == 24
    x = torch.flatten(x.transpose(2, 3), 2)
    return self.last(self.flat(x)).unflatten(0, (x.size(0), -1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_reshapes_a_quantized_tensor_reshapes_its_codes(
    share: float, channels_last: bool, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images(channels_last)
    layers = {"conv": nn.Conv2d(3, 16, 3), "mix": nn.Linear(16, 24), "last": nn.Linear(24 * 14, 5)}
    model = prepared(Plain(moves, **layers, drop=nn.Dropout(share), flat=nn.Flatten(0, 1)), x)
    decoded: list[int] = []
    original = DecodeFunction.apply
    monkeypatch.setattr(DecodeFunction, "apply", lambda *inputs: decoded.append(1) or original(*inputs))
    # Where tensors lie in another order a dropout draws other numbers for them.
    if share == 0 or channels_last:
        assert_same(model, x)
    else:
        model(x).sum().backward()
    assert "EncodeFunction" not in counted
    assert bool(decoded) == (share > 0)


def test_what_moves_values_otherwise_is_followed_by_encoding(x: Tensor, counted: list[str]) -> None:
    layers = {"a": nn.Conv2d(3, 16, 3), "b": nn.Conv2d(16, 5, 3)}
    assert_same(prepared(Plain(lambda self, x: self.b(torch.roll(F.relu(self.a(x)), 1, 2)), **layers), x), x)
    assert "EncodeFunction" in counted
