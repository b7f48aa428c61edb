"""Training on codes against plain operations: the model, its results both ways, and what ran on codes."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.codes.operators.curves import QuantizeCurveFunction, QuantizeSoftmaxFunction
from qat.codes.operators.matmul import MatmulFunction
from qat.codes.operators.pool import MaxPoolFunction
from qat.codes.operators.product import CodesProductFunction
from qat.codes.operators.quantize import EncodeFunction
from qat.kernels import plain_formulas


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
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
    """What ran on codes, without what a self-check runs."""
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    ran: list[str] = []
    for function in (
        CodesProductFunction, MaxPoolFunction, EncodeFunction, MatmulFunction, QuantizeCurveFunction,
        QuantizeSoftmaxFunction,
    ):  # fmt: skip
        original = function.apply

        def apply(
            *inputs: object, _original: Callable[..., object] = original, _name: str = function.__name__
        ) -> object:
            ran.append(_name)
            return _original(*inputs)

        monkeypatch.setattr(function, "apply", apply)
    return ran
