"""Training on codes against plain operations: a model's results both ways, and what ran on codes."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.codes.operators.curves import QuantizeCurveFunction, QuantizeSoftmaxFunction
from qat.codes.operators.matmul import MatmulFunction
from qat.codes.operators.pool import MaxPoolFunction
from qat.codes.operators.product import CodesProductFunction
from qat.codes.operators.quantize import DecodeFunction, EncodeFunction
from qat.kernels import plain_formulas


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """As users have them; the tests themselves run on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def images(channels_last: bool = False, count: int = 8, size: int = 16, seed: int = 0) -> Tensor:
    x = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last) if channels_last else x


def prepared(model: nn.Module, x: Tensor, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    quantized = qat.prepare(model, recipe, example_inputs=x)
    qat.calibrate(quantized, [x])
    return quantized.train()


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output, gradients and buffers of a training step."""
    model.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **gradients, **{f"{name} ": b.clone() for name, b in model.named_buffers()}}


def results(model: nn.Module, x: Tensor, plain: bool, needs_x: bool = True) -> dict[str, Tensor]:
    """Of one training step of a copy, with the gradient of the input."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_(needs_x)
    torch.manual_seed(1)  # for dropouts
    with plain_formulas() if plain else torch.enable_grad():
        found = step(model, x, model)
    assert (x.grad is not None) == needs_x
    return {**found, "x": torch.zeros(()) if x.grad is None else x.grad}


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
    """What ran on codes, without what a self-check runs."""
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    ran: list[str] = []
    for function in (
        CodesProductFunction, MaxPoolFunction, EncodeFunction, MatmulFunction, QuantizeCurveFunction,
        QuantizeSoftmaxFunction, DecodeFunction,
    ):  # fmt: skip
        original = function.apply

        def apply(
            *inputs: object, _original: Callable[..., object] = original, _name: str = function.__name__
        ) -> object:
            ran.append(_name)
            return _original(*inputs)

        monkeypatch.setattr(function, "apply", apply)
    return ran
