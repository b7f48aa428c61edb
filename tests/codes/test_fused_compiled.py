"""Training on codes under torch.compile: whole graphs whose gradients are those of the same model without it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.speed_memory import saved_bytes
from qat.kernels import float_products, plain_formulas
from qat.kernels.cpu import compiler
from tests.references import cases_fused
from tests.references.cases_fused import step
from tests.references.cases_waiting import Watch
from tests.references.nets import Everything

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def images(count: int = 8, seed: int = 0, channels_last: bool = True) -> Tensor:
    return cases_fused.images(channels_last, count, seed=seed)


def models(x: Tensor, momentum: float | None = 0.1) -> tuple[nn.Module, nn.Module, Any]:
    """A prepared one, its twin, and the first one compiled."""
    model = cases_fused.prepared(Everything(momentum), x)
    return model, copy.deepcopy(model), torch.compile(model, fullgraph=True)


def assert_near(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Compiled code and formulas sum in another order; a scale's gradient is a sum of terms that cancel.

    A bias is compared with its weight too, since in front of a norm its gradient cancels.
    """
    assert expected.keys() == found.keys()
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    for name, value in expected.items():
        weight = norms.get(f"{name.removesuffix('.bias')}.weight", 0.0) * name.endswith(".bias")
        error = float((value.double() - found[name].double()).norm()) / max(norms[name], weight, 1e-3)
        assert error < (2e-3 if name.endswith("scale") else 1e-4), (name, error)


@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_step_is_that_of_the_fused_model(channels_last: bool) -> None:
    x = images(channels_last=channels_last)
    model, twin, compiled = models(x, momentum=None)
    for seed in range(3):
        x = images(seed=seed, channels_last=channels_last)
        assert_near(step(twin, x, twin), step(model, x, compiled))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_it_follows_switches_modes_and_sizes() -> None:
    x = images()
    model, twin, compiled = models(x)

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
            if name.endswith(("conv3.weight_quantizer.scale", "bn1_quantizer.scale")):
                p.data.fill_(float("nan"))
    both_agree(x)
    for each in (model, twin):
        each.eval()
    with torch.no_grad():
        assert torch.equal(twin(x), compiled(x))


@pytest.mark.slow
def test_a_compiled_model_keeps_no_more_than_an_eager_one() -> None:
    x = images(32)
    model, twin, compiled = models(x)
    step(model, x, compiled)

    def kept(forward: Callable[[Tensor], Tensor]) -> int:
        forward(x)
        return saved_bytes(lambda: forward(x).square().sum())

    assert 0 < kept(compiled) <= kept(twin)


def test_the_plain_graph_never_waits_for_the_device() -> None:
    """On CUDA it is recorded as a graph."""
    x = images()
    model = cases_fused.prepared(Everything(), x)
    parameters = tuple(model.parameters())
    with plain_formulas(), Watch((x,)) as watch:
        torch.autograd.grad(model(x).square().sum(), parameters, allow_unused=True)
    assert watch.seen > 500
