"""Training on codes by formula, which is what compiled models on CUDA do, seen on the CPU."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.speed_memory import saved_bytes
from qat.fused.functions import scale_repair
from qat.kernels import float_products, kernels_by_formula, plain_formulas
from qat.kernels.cpu import compiler, quantizers
from qat.kernels.dispatch import _switches
from qat.kernels.formulas import products
from tests.references.cases_compiled import Everything, assert_near, differences, images, prepared, step
from tests.references.cases_waiting import WAITING, Watch


@pytest.fixture(autouse=True)
def by_formula() -> Iterator[None]:
    torch.compiler.reset()
    with kernels_by_formula():
        yield
    torch.compiler.reset()


@contextmanager
def formulas_left() -> Iterator[None]:
    """As behind the end of `kernels_by_formula`."""
    _switches.by_formula = False
    yield
    _switches.by_formula = True


class Graphs:
    """A backend of torch.compile that keeps the graphs of forward and backward, and runs them as they are."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []
        self.backend: Any = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.found.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    def names(self, number: int) -> list[str]:
        """Operations of a graph, such as `aten._int_mm`."""
        return [str(node.target).rsplit(".", 1)[0] for node in self.found[number].graph.nodes if node.op != "output"]


@pytest.mark.parametrize("in_float", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_step_is_that_of_the_plain_graph(momentum: float | None, in_float: bool) -> None:
    x = images()
    model = prepared(x, momentum)
    other = copy.deepcopy(model)
    with plain_formulas():
        expected = step(other, x, other)
    with float_products() if in_float else nullcontext():
        assert_near(expected, step(model, x, model))


def test_compiled_it_is_one_graph_each_way_with_integer_products_and_nothing_that_waits() -> None:
    x = images(32)
    model = prepared(x)
    eager = copy.deepcopy(model)
    graphs = Graphs()
    found = step(model, x, torch.compile(model, fullgraph=True, backend=graphs.backend))
    assert_near(step(eager, x, eager), found)
    assert len(graphs.found) == 2
    # conv3, key and query: 32 inputs, 17 rows and more; conv1 and short have 3, the others are no such products.
    assert graphs.names(0).count("aten._int_mm") == 3
    names = graphs.names(0) + graphs.names(1)
    assert not {f"aten.{name}" for name in WAITING} & set(names)
    assert not [name for name in names if name.startswith("qat.")]
    assert names.count("auto_functionalized_v2") == 1  # what puts scales back


def test_compiled_on_contiguous_images_too() -> None:
    """Integer products leave channels innermost, and are copied behind; torch 2.11 lost gradients there."""
    x = images(32, channels_last=False)
    model = prepared(x)
    eager = copy.deepcopy(model)
    found = step(model, x, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert_near(step(eager, x, eager), found)


def test_a_backward_outside_of_the_context_knows_halves() -> None:
    x = images()
    model = prepared(x)
    twin = copy.deepcopy(model)
    losses = []
    for each in (model, twin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(each(x).float().square().sum())
    losses[0].backward()
    with formulas_left():
        losses[1].backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-2, atol=1e-2 * float(p.grad.abs().max()))


def test_formulas_need_no_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images()
    model = prepared(x)
    other = copy.deepcopy(model)
    expected = step(model, x, model)
    for module in (quantizers, scale_repair, compiler):
        monkeypatch.setattr(module, "library", lambda: None)
    found = step(other, x, other)
    # What is not on codes (hidden's input) is quantized by the plain formula, whose sums have another order.
    assert torch.equal(expected["y"], found["y"])
    assert_near(expected, found)


def test_broken_scales_on_several_devices_are_put_back() -> None:
    with FakeTensorMode():
        scales = [torch.ones((), device=device) for device in ("cpu", "cuda", "cpu", "cuda")]
        scale_repair._put_back._init_fn(scales, [each * 0.1 for each in scales])
    assert [each.device.type for each in scales] == ["cpu", "cuda", "cpu", "cuda"]


def kept(forward: Callable[[Tensor], Tensor], x: Tensor) -> int:
    forward(x)
    return saved_bytes(lambda: forward(x).square().sum())


@pytest.mark.slow
def test_inductor_compiles_it_and_keeps_for_backward_what_the_eager_formulas_keep() -> None:
    x = images()
    model, float_model = prepared(x), Everything().train().to(memory_format=torch.channels_last)
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True)
    found = step(model, x, compiled)
    errors = differences(step(eager, x, eager), found)
    # Inductor rounds y * alpha + offset once: a value next to a tie falls on the other level, here and there.
    assert errors["y"] < 0.01 and sum(errors.values()) < 0.02 * len(errors), errors
    floats, ours = kept(float_model, x), kept(compiled, x)
    assert 0 < ours <= kept(eager, x) and ours < 0.75 * floats, (ours, floats)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mixed_precision_is_no_further_from_float32_than_that_of_the_plain_graph(compiled: bool) -> None:
    x = images(32)
    models = [prepared(x) for _ in range(3)]

    def mixed(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(image: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(image)
            assert y.dtype == torch.bfloat16
            return y.float()

        return forward

    exact = step(models[0], x, models[0])
    run = torch.compile(models[1], fullgraph=True, backend="aot_eager") if compiled else models[1]
    found = step(models[1], x, mixed(run))
    with plain_formulas():
        plain = step(models[2], x, mixed(models[2]))
    assert all(found[name].dtype == value.dtype for name, value in exact.items())
    ours, theirs = differences(exact, found), differences(exact, plain)
    weights, scales = ([name for name in ours if name.endswith(kind)] for kind in ("weight", "scale"))
    assert len(weights) >= 12 and len(scales) >= 20
    for names in (weights, scales):
        assert sum(ours[name] for name in names) < 1.1 * sum(theirs[name] for name in names)
    assert ours["y"] < 0.05


def test_a_broken_scale_is_put_back_without_looking() -> None:
    x = images()
    model = prepared(x)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = run(x).detach()
    scales = [p for name, p in model.named_parameters() if name.endswith("scale")]
    before = [scale.detach().clone() for scale in scales]
    with torch.no_grad():
        scales[0].fill_(math.nan)
        scales[-1].fill_(math.inf)
    found = run(x).detach()
    for scale, value in zip(scales, before, strict=True):
        assert torch.allclose(scale.detach(), value)
    assert torch.allclose(found, expected, atol=1e-5)


def test_models_that_are_not_compiled_never_wait_either() -> None:
    """On CUDA they run as their graph."""
    x = images()
    model = prepared(x)
    parameters = tuple(model.parameters())
    with plain_formulas(), Watch((x,)) as watch:
        loss = model(x).square().sum()
        torch.autograd.grad(loss, parameters, allow_unused=True)
    assert watch.seen > 500


def test_products_that_a_device_gets_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._int_mm
    monkeypatch.setattr(products, "_int_mm_found", {})
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: original(a, b).clamp_(max=1 << 15))
    assert not products.try_int_mm(torch.device("cpu"))
    model: nn.Module = prepared(images(32))
    monkeypatch.setattr(torch, "_int_mm", lambda *_: pytest.fail("multiplied in integers"))
    step(model, images(32), model)
