"""Training on codes under torch.compile: whole graphs whose gradients are those of the same model without it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qat
from benchmarks.speed_memory import saved_bytes
from qat.kernels import compiler, float_products, plain_formulas

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


class Everything(nn.Module):
    """What the fused graph knows: norms, clips, sums, a pool, a grouped convolution, curves, attention.

    No norm and no mean that torch itself computes in front of a quantizer: compiled code sums in another order, and a
    value next to a tie would fall on the other level.
    """

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.BatchNorm2d(32, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32, momentum=momentum)  # type: ignore[arg-type]
        self.conv4, self.bn4 = nn.Conv2d(32, 32, 3, 2, padding=1), nn.BatchNorm2d(32, track_running_stats=False)
        self.short = nn.Conv2d(3, 32, 1)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(0.0)
        self.hidden, self.head = nn.Linear(32, 24), nn.Linear(24, 5)
        self.query, self.key = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, image: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(image))))
        y = F.relu6(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(y)) + x)
        x = x + x
        x = F.hardtanh(self.bn4(self.conv4(x)), -1.0, 1.0)
        rows = F.gelu(x + self.short(image[:, :, ::4, ::4])).flatten(2).mT
        query, key = self.query(rows), F.silu(self.key(rows))
        rows = torch.softmax(query @ key.mT * 0.25, -1) @ rows
        x = self.drop(F.relu(self.hidden(rows[:, 0])))
        return self.head(x)  # type: ignore[no-any-return]


def images(count: int = 8, seed: int = 0, channels_last: bool = True) -> Tensor:
    x = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last) if channels_last else x


def prepared(x: Tensor, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    model = qat.prepare(Everything(momentum), example_inputs=x)
    qat.calibrate(model, [x])
    return model.train()


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output, gradients and buffers."""
    model.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **gradients, **{f"{name} ": b.clone() for name, b in model.named_buffers()}}


def assert_near(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        error = (value.double() - found[name].double()).norm() / value.double().norm().clamp(min=1e-3)
        # Compiled code sums in another order; a scale's gradient is a sum of terms that cancel.
        assert error < (2e-3 if name.endswith("scale") else 1e-4), (name, error)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_step_is_that_of_the_fused_model(channels_last: bool) -> None:
    x = images(channels_last=channels_last)
    model = prepared(x, momentum=None)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for seed in range(3):
        x = images(seed=seed, channels_last=channels_last)
        assert_near(step(twin, x, twin), step(model, x, compiled))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_it_follows_switches_modes_and_sizes() -> None:
    """A smaller last batch, evaluation, frozen norms, products in float, plain formulas, a scale that broke."""
    x = images()
    model = prepared(x)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)

    def both_agree(x: Tensor) -> None:
        assert_near(step(twin, x, twin), step(model, x, compiled))

    both_agree(x)
    for count in (5, 3, 8, 2):
        both_agree(images(count, seed=count))
    assert counters["stats"]["unique_graphs"] == 2  # one more for batches of any size
    for each in (model, twin):
        each.get_submodule("bn1").eval()
    both_agree(x)
    with float_products():
        both_agree(x)
    with plain_formulas():  # as torch compiles them, a value next to a tie may fall on the next level
        formulas, found = step(twin, x, twin)["y"], step(model, x, compiled)["y"]
        assert (formulas - found).norm() < 5e-3 * formulas.norm()
    for each in (model, twin):
        each.train()
        for name, p in each.named_parameters():
            if name.endswith("conv3.weight_quantizer.scale") or name.endswith("bn1_quantizer.scale"):
                p.data.fill_(float("nan"))
    both_agree(x)
    for each in (model, twin):
        each.eval()
    with torch.no_grad():
        assert torch.equal(twin(x), compiled(x))


@pytest.mark.slow
def test_a_compiled_model_keeps_no_more_than_an_eager_one() -> None:
    x = images(32)
    model = prepared(x)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    step(model, x, compiled)

    def kept(of: nn.Module, forward: Callable[[Tensor], Tensor]) -> int:
        return saved_bytes(lambda: forward(x).square().sum(), [*of.parameters(), *of.buffers()])

    assert 0 < kept(model, compiled) <= kept(twin, twin)
