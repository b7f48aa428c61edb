"""Training on codes against the same model in plain operations: values, gradients, statistics, when it steps back."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.kernels import compiler, float_products, plain_formulas, products
from qat.layers.codes import Codes, EncodeFunction, carrier_for, decode
from qat.layers.pools import MaxPoolFunction, max_pool, window_of
from qat.layers.products import CodesProductFunction
from qat.preparation.fused_graph import fused_forward
from qat.preparation.prepared_graph import PreparedGraph

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """As users have them; the tests themselves run on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """A residual block with a downsampling path, a pool and a classifier."""

    def __init__(self, act: Callable[[], nn.Module] = nn.ReLU, **norm: object) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32, **norm)  # type: ignore[arg-type]
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(32, **norm)  # type: ignore[arg-type]
        self.conv3 = nn.Conv2d(32, 32, 1)
        self.act, self.pool, self.head = act(), nn.MaxPool2d(2), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.bn1(self.conv1(x))))
        y = self.act(self.bn2(self.conv2(x)))
        y = F.relu(self.conv3(y) + x)
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def images(channels_last: bool = False, count: int = 8, size: int = 16) -> Tensor:
    x = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=torch.channels_last) if channels_last else x


def prepared(model: nn.Module, x: Tensor, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    quantized = qat.prepare(model, recipe, example_inputs=x)
    qat.calibrate(quantized, [x])
    return quantized.train()


def results(model: nn.Module, x: Tensor, plain: bool, needs_x: bool = True) -> dict[str, Tensor]:
    """Output, gradients and buffers of one training step of a copy."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_(needs_x)
    torch.manual_seed(1)  # for dropouts
    with plain_formulas() if plain else torch.enable_grad():
        y = model(x)
        y.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert (x.grad is not None) == needs_x
    gradients["x"] = torch.zeros(()) if x.grad is None else x.grad
    return {"y": y.detach(), **gradients, **{f"{name} ": b for name, b in model.named_buffers()}}


def errors(model: nn.Module, x: Tensor, needs_x: bool) -> dict[str, float]:
    """Relative to the tolerance: how far the fused step is from the formula, for everything that differs too much."""
    formula, fast = (results(model, x, plain, needs_x) for plain in (True, False))
    assert formula.keys() == fast.keys()
    found = {}
    for name, expected in formula.items():
        error = (expected.double() - fast[name].double()).norm() / expected.double().norm().clamp(min=1e-3)
        # A scale's gradient is a sum of many terms that cancel.
        found[name] = float(error) / (1e-3 if name.endswith("scale") else 2e-5)
    return {name: error for name, error in found.items() if not error <= 1}


def assert_same(model: nn.Module, x: Tensor, needs_x: bool = True) -> None:
    """For one of a few inputs at least: in the others one value next to a tie may fall on the next level."""
    attempts = []
    for seed in range(4):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        attempts.append(errors(model, x + 0.1 * seed * noise, needs_x))
        if not attempts[-1]:
            return
    raise AssertionError(str(attempts))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran on codes."""
    ran: list[str] = []
    for function in (CodesProductFunction, MaxPoolFunction, EncodeFunction):
        original = function.apply

        def apply(
            *inputs: object, _original: Callable[..., object] = original, _name: str = function.__name__
        ) -> object:
            ran.append(_name)
            return _original(*inputs)

        monkeypatch.setattr(function, "apply", apply)
    return ran


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, lambda: nn.Hardtanh(-1, 1), lambda: nn.ReLU(inplace=True)])
def test_a_step_is_that_of_the_plain_operations(
    act: Callable[[], nn.Module], channels_last: bool, counted: list[str]
) -> None:
    torch.manual_seed(0)
    x = images(channels_last)
    model = Block(act)
    assert_same(prepared(model.to(memory_format=torch.channels_last) if channels_last else model, x), x)
    assert counted.count("CodesProductFunction") == 4 * counted.count("MaxPoolFunction") > 0


@pytest.mark.parametrize("grad_scale", ["sample", "relative"])
def test_the_scale_of_an_image_learns_without_the_gradient_of_the_image(grad_scale: str) -> None:
    """Read by a convolution, by a linear layer, by both and a sum: each finds its share of the scale's gradient."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(3, 3, 1)
            self.norm, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(F.relu(self.norm(self.conv(x)))).mean((2, 3))
            return y + self.conv(F.relu(self.other(x) + x)).mean()

    torch.manual_seed(0)
    activation = qat.QuantSpec(signed=False, symmetric=False, grad_scale=grad_scale)  # type: ignore[arg-type]
    for model in (Ends(), Block(), nn.Sequential(nn.Flatten(), nn.Linear(768, 8))):
        assert_same(prepared(model, images(), qat.QuantRecipe(activation=activation)), images(), needs_x=False)


SPECS = {
    "signed affine": qat.QuantSpec(signed=True, symmetric=False),
    "signed symmetric": qat.QuantSpec(signed=True, symmetric=True),
    "4 bits": qat.QuantSpec(bits=4, signed=False, symmetric=False, grad_scale="batch"),
    "relative": qat.QuantSpec(signed=False, symmetric=False, grad_scale="relative"),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_grid_that_fits_eight_bits(name: str, counted: list[str]) -> None:
    torch.manual_seed(0)
    x = images(True)
    weight = qat.QuantSpec(bits=3, narrow_range=True, grad_scale="relative" if name == "relative" else "sample")
    assert_same(prepared(Block(), x, qat.QuantRecipe(weight, SPECS[name])), x)
    assert counted.count("CodesProductFunction") == 4 * counted.count("MaxPoolFunction") > 0


@pytest.mark.parametrize("norm", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}])
def test_every_batch_norm(norm: dict[str, object]) -> None:
    torch.manual_seed(0)
    assert_same(prepared(Block(**norm), images()), images())


def test_frozen_statistics() -> None:
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    before = model.get_submodule("bn1").running_mean.clone()  # type: ignore[operator, union-attr]
    assert_same(model, x)
    model(x)
    assert torch.equal(model.get_submodule("bn1").running_mean, before)  # type: ignore[arg-type]


def test_scales_that_an_optimizer_drove_out_of_bounds() -> None:
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    with torch.no_grad():
        model.get_parameter("conv1_quantizer.scale").fill_(float("nan"))
        model.get_parameter("conv2_quantizer.scale").fill_(-1.0)
        weights = model.get_parameter("conv3.weight_quantizer.scale")
        weights[0], weights[1] = float("inf"), 1e-9
    assert_same(model, x)


def test_a_layer_in_evaluation_folds_its_norm_as_ever() -> None:
    torch.manual_seed(0)
    x = images()
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model = prepared(net, x)
    for name in ("3", "4"):
        model.get_submodule(name).eval()
    with plain_formulas():
        expected = copy.deepcopy(model)(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_nan_is_not_lost() -> None:
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    x[0, 0, 0, 0] = float("nan")
    y = model(x)
    assert y.isnan().all()
    y.sum().backward()
    assert model.get_parameter("conv1.weight").grad.isnan().any()  # type: ignore[union-attr]


def test_nothing_else_is_kept_for_backward_than_in_float() -> None:
    torch.manual_seed(0)

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


def test_hooks_are_called() -> None:
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    seen: list[str] = []
    for name in ("conv1", "conv1_quantizer", "bn2", "act", "conv2.weight_quantizer", "conv3_quantizer"):
        found = dict(model.named_modules()).get(name)
        if found is not None:
            found.register_forward_hook(lambda *_, name=name: seen.append(name))
    expected = results(model, x, plain=True)
    plain_calls = sorted(set(seen))
    seen.clear()
    fast = results(model, x, plain=False)
    assert sorted(set(seen)) == plain_calls and len(plain_calls) >= 4
    assert torch.allclose(expected["y"], fast["y"], rtol=1e-4)


def test_the_model_stays_what_it_was() -> None:
    """It pickles, copies, evaluates and follows changes of its graph as if nothing were fused."""
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    model(x)
    keys = list(model.state_dict())
    again = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded).__mro__[1] is type(model).__mro__[1] is PreparedGraph and loaded.derive() is not None
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


def test_a_parameter_that_is_replaced_is_the_one_that_runs() -> None:
    torch.manual_seed(0)
    x = images()
    model = prepared(Block(), x)
    before = model(x)
    replaced = {name: p * 1.5 for name, p in model.named_parameters() if name == "head.bias"}
    after = torch.func.functional_call(model, replaced, (x,))
    assert torch.allclose(after - before, model.get_parameter("head.bias") * 0.5, atol=1e-5)


def test_a_tensor_that_is_written_to_is_not_held_as_codes() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.a(x))
            y = self.b(x)
            x += y.mean()
            return y.mean((2, 3)) + x.mean()

    torch.manual_seed(0)
    x = images()
    assert_same(prepared(Writes(), x), x)


def test_second_derivatives_point_the_way() -> None:
    x = images()
    model = prepared(Block(), x)
    weight = model.get_parameter("conv1.weight")
    (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
    with pytest.raises(
        RuntimeError,
        match=r"^a prepared model on kernels has first derivatives only; for second ones run its forward in"
        r" `with qat\.kernels\.plain_formulas\(\):`$",
    ):
        first.sum().backward()
    with plain_formulas():
        (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
        first.square().sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_where_nothing_can_be_fused_the_graph_itself_runs() -> None:
    x = images()
    recipe = qat.QuantRecipe(qat.QuantSpec(rule="dorefa"), qat.QuantSpec(rule="minmax", symmetric=False))
    model = prepared(Block(), x, recipe)
    assert isinstance(model, torch.fx.GraphModule) and fused_forward(model) is None
    model(x).sum().backward()


def test_a_linear_layer_reads_rows(counted: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU6(), nn.Linear(48, 3))
    x = torch.randn(40, 20, 64)
    assert_same(prepared(model, x), x)
    assert counted and counted.count("CodesProductFunction") == len(counted)


def test_products_in_float_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integer product differs from the float one by rounding only, and is left alone where that is asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
    x = torch.randn(400, 64)
    quantized = prepared(model, x)
    calls: list[tuple[int, ...]] = []
    original = products.linear

    def linear(codes: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(codes.shape))
        return original(codes, *rest)

    monkeypatch.setattr(products, "linear", linear)
    with float_products():
        in_float = quantized(x)
    assert calls == []
    in_integers = quantized(x)
    assert calls == ([(400, 64), (400, 48)] if products.are_exact() else [])
    assert torch.allclose(in_float, in_integers, rtol=1e-5, atol=1e-6)


def test_where_integers_are_wrong_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without VNNI, whose sums saturate."""
    products.are_exact.cache_clear()
    original = products.convolution
    monkeypatch.setattr(products, "convolution", lambda *operands: original(*operands).clamp(-100000, 100000))
    assert not products.are_exact()
    x = torch.randn(400, 64)
    model = prepared(nn.Sequential(nn.Linear(64, 8)), x)
    monkeypatch.setattr(products, "convolution", lambda *operands: pytest.fail("multiplied in integers"))
    assert model(x).isfinite().all()
    products.are_exact.cache_clear()


def test_codes_know_their_shape() -> None:
    codes = Codes(torch.zeros(()).expand(2, 3), torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0.5, 3.0]))
    assert codes.shape == (2, 3) and codes.dim() == 2


POOLS = {
    "of a ResNet": {"kernel_size": 3, "stride": 2, "padding": 1},
    "without stride": {"kernel_size": 2},
    "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "ceil, with padding": {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
    "dilated": {"kernel_size": (2, 3), "stride": (1, 2), "dilation": (3, 2), "padding": (1, 0)},
    "wide": {"kernel_size": (5, 1), "stride": 1, "padding": (2, 0)},
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_of_codes_is_that_of_the_tensor(name: str, channels_last: bool) -> None:
    """Ties too: of few codes, every window holds some several times."""
    pool = nn.MaxPool2d(**POOLS[name])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 6, (2, 5, 11, 14), dtype=torch.uint8, generator=generator)
    if channels_last:
        codes = codes.to(memory_format=torch.channels_last)
    x = ((codes.float() - 3) * 0.5).requires_grad_()
    expected = pool(x)
    grad = torch.randn(expected.shape, generator=generator)
    expected.backward(grad)
    carrier = carrier_for(codes).requires_grad_()
    window = window_of(pool)
    assert window is not None
    pooled = max_pool(Codes(carrier, codes, torch.tensor([0.5, 3.0])), window, pool)
    assert isinstance(pooled, Codes) and pooled.codes.stride() == expected.stride()
    y = decode(pooled)
    assert torch.equal(y, expected)
    y.backward(grad)
    assert carrier.grad is not None and x.grad is not None
    assert torch.allclose(carrier.grad, x.grad, atol=1e-6)


def test_a_pool_with_a_hook_is_called() -> None:
    pool, seen = nn.MaxPool2d(2), []
    pool.register_forward_hook(lambda *_: seen.append(1))
    codes = torch.randint(0, 6, (2, 5, 8, 8), dtype=torch.uint8)
    window = window_of(pool)
    assert window is not None
    assert isinstance(max_pool(Codes(carrier_for(codes), codes, torch.tensor([0.5, 3.0])), window, pool), Tensor)
    assert seen == [1]


def test_pools_that_return_indices_are_not_taken() -> None:
    assert window_of(nn.MaxPool2d(2, return_indices=True)) is None


def test_a_pool_as_a_function_runs_on_codes(counted: list[str]) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.a(x)), 3, 2, padding=1)
            return self.b(x).mean((2, 3)) + x.mean()

    torch.manual_seed(0)
    x = images(True)
    assert_same(prepared(Pools(), x), x)
    assert "MaxPoolFunction" in counted and "EncodeFunction" not in counted


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("pool_first", [False, True])
def test_a_pool_beside_a_dropout(pool_first: bool, share: float, counted: list[str]) -> None:
    """An active dropout takes the tensor off its grid: what it left is pooled, and read, in float."""
    torch.manual_seed(0)
    x = images(True)  # both ways draw the same numbers where tensors lie in the same order
    between = [nn.MaxPool2d(2), nn.Dropout(share)] if pool_first else [nn.Dropout(share), nn.MaxPool2d(2)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *between, nn.Conv2d(16, 4, 3))
    model = prepared(net.to(memory_format=torch.channels_last), x)
    assert_same(model, x)
    assert ("MaxPoolFunction" in counted) == (pool_first or share == 0)


def test_what_reshapes_a_quantized_tensor_is_followed_by_encoding(counted: list[str]) -> None:
    torch.manual_seed(0)
    x = images()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 5))
    assert_same(prepared(model, x), x)
    assert "EncodeFunction" in counted
