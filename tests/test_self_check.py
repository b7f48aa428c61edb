"""The engine's proof of itself: what is wrong is found, named and not run; what is right is left as it was."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases_fused import Block, images, results
from torch import Tensor, nn

import qat
from qat.kernels import compiler, plain_formulas
from qat.layers import chains, products
from qat.preparation import fused_graph, references
from qat.preparation.prepared_graph import PreparedGraph

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


def calibrated(model: nn.Module, x: Tensor) -> PreparedGraph:
    model = qat.prepare(model, example_inputs=x)
    qat.calibrate(model, [x])
    assert isinstance(model, PreparedGraph)
    return model.train()


class Residual(nn.Module):
    """A sum whose result the next layer reads as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.c(F.relu(self.norm(self.b(y)) + y))  # type: ignore[no-any-return]


def replace(monkeypatch: pytest.MonkeyPatch, name: str, table: dict[Any, Any], changed: Callable[..., Any]) -> None:
    """Let fused graphs call something else instead of one of their functions, in the sight of the check."""
    original = getattr(fused_graph, name)
    monkeypatch.setattr(fused_graph, name, changed)
    monkeypatch.setitem(table, changed, table[original])


def test_a_sound_model_trains_on_codes_and_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    x = images()
    model = qat.prepare(Block(), example_inputs=x)
    qat.calibrate(model, [x])
    assert isinstance(model, PreparedGraph)
    model._verdicts.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    verdict = model._prove(x)
    assert torch.equal(torch.rand(3), expected)
    assert verdict is not None and verdict.distrusted == () and not verdict.reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", ["forward", "gradient"])
def test_a_wrong_product_is_found_and_its_layers_are_called(
    error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = images()

    def changed(layer: Any, x: Any, grid: Any, *operands: Any, copies: int = 1) -> Tensor:
        y = products.multiply(layer, x, grid, *operands, copies=copies)
        if layer.weight.shape[2:] != (1, 1):
            return y
        return y * 1.01 if error == "forward" else y + 0.1 * (y - y.detach())

    replace(monkeypatch, "multiply", references.COMPUTING, changed)
    with caplog.at_level(logging.WARNING, "qat"):
        model = calibrated(Block(), x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted == ("conv3",)
    what = "the result of conv3 differs" if error == "forward" else "a gradient of conv3 differs"
    assert [record.message for record in caplog.records if what in record.message]
    plain, fast = (results(model, x, formula) for formula in (True, False))
    assert torch.allclose(plain["y"], fast["y"], atol=1e-4)
    graph = model._derive().graph
    assert graph is not None
    assert sum(node.target is changed for node in graph.nodes) == 3  # the other layers still run on codes


def test_a_wrong_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = images()

    def changed(y: Any, quantizer: Any, norm: Any = None, floor: float = 0, *rest: Any) -> Any:
        return chains.quantize_chain(y, quantizer, norm, 0.1 if norm is not None else floor, *rest)

    replace(monkeypatch, "quantize_chain", references.QUANTIZING, changed)
    model = calibrated(Block(), x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted is not None and {"conv1_quantizer", "conv2_quantizer"} <= set(verdict.distrusted)
    plain, fast = (results(model, x, formula) for formula in (True, False))
    assert torch.allclose(plain["y"], fast["y"], atol=1e-4)


def test_a_wrongly_wired_graph_never_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    x = images()
    original = fused_graph.fused_graph

    def crossed(model: Any, distrusted: Any = ()) -> Any:
        graph = original(model, distrusted)
        assert graph is not None
        for node in graph.nodes:
            if node.target is chains.quantize_sum:
                node.args = (node.args[0], node.args[0], *node.args[2:])
        return graph

    monkeypatch.setattr("qat.preparation.checking.fused_graph", crossed)
    with caplog.at_level(logging.WARNING, "qat"):
        model = calibrated(Residual(), x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted is None and model._derive().run is None
    assert "trains operation by operation: its fused step differs from the plain one: an answer" in caplog.text


def test_an_exception_of_the_fused_step_is_no_exception_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = images()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    replace(monkeypatch, "quantize_sum", references.QUANTIZING, broken)
    model = calibrated(Residual(), x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted is None and "raises RuntimeError: no such kernel" in verdict.reason
    model(x).sum().backward()


def test_the_first_step_checks_what_calibration_did_not_see() -> None:
    torch.manual_seed(0)
    x = images()
    first = calibrated(Block(), x)
    model = qat.prepare(Block(), example_inputs=x)
    model.load_state_dict(first.state_dict())
    assert isinstance(model, PreparedGraph) and not model._verdicts
    model.train()
    model(x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted == ()


def test_every_change_is_checked_anew_and_known_states_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = images()
    model = calibrated(Block(), x)
    model(x)
    assert len(model._verdicts) == 1
    model.conv1.eval()
    model(x)
    assert len(model._verdicts) == 2
    model.conv1.train()
    monkeypatch.setattr("qat.preparation.prepared_graph.judge", None)  # not asked again
    model(x)
    copied = copy.deepcopy(model)
    copied(x)


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    monkeypatch.setattr("qat.preparation.prepared_graph.judge", None)
    x = images()
    model = calibrated(Block(), x)
    model(x)
    assert not model._verdicts and model._derive().run is not None


def test_a_pickle_does_not_vouch_for_another_machine() -> None:
    x = images()
    model = calibrated(Block(), x)
    assert model._verdicts and not pickle.loads(pickle.dumps(model))._verdicts


def test_hooks_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, seen = images(), []
    model = qat.prepare(Block(), example_inputs=x)
    qat.calibrate(model, [x])
    model.train()
    model.conv2.register_forward_hook(lambda *_: seen.append("conv2"))  # type: ignore[union-attr]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append("saved"), t)[1], lambda t: t):
        model(x)
    assert seen.count("conv2") == 1 and len(model._verdicts) == 2  # type: ignore[arg-type]


def test_a_model_without_gradients_is_not_checked_in_inference_mode() -> None:
    x = images()
    first = calibrated(Block(), x)
    model = qat.prepare(Block(), example_inputs=x)
    model.load_state_dict(first.state_dict())
    model.train()
    with torch.inference_mode(), plain_formulas():
        expected = copy.deepcopy(model)(x)
    with torch.inference_mode():
        assert torch.equal(copy.deepcopy(model)(x), expected)


def test_one_sample_where_no_statistics_are_taken() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.sizes = nn.Linear(8, 16), nn.Linear(16, 4), []

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]

    model = calibrated(Head(), torch.randn(6, 8))
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted == ()
