"""The engine's proof of itself: what is wrong is found, named and not run; what is right is left as it was."""

import copy
import dataclasses
import functools
import logging
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

import qat
from qat.codes.check import judging
from qat.codes.check.training_step import difference
from qat.codes.graph import FusedGraph
from qat.codes.operators import add, product
from qat.codes.operators import norm as norms
from qat.codes.training import rewriting
from qat.kernels import plain_formulas
from qat.kernels.cpu import compiler
from tests.references.cases_fused import images, prepared, results
from tests.references.nets import Block, Deep, between, residual
from tests.references.prepared_case import Plain

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


NET = Deep


def unchecked(net: Callable[[], nn.Module], x: Tensor) -> FusedGraph:
    """A calibrated model whose first step is still to be checked."""
    model = qat.prepare(net(), example_inputs=x)
    model.load_state_dict(prepared(net(), x).state_dict())
    assert isinstance(model, FusedGraph) and not model._verdicts
    return model.train()


def distrusted(model: Any) -> list[tuple[str, ...] | None]:
    return [verdict.distrusted for verdict in model._verdicts.values()]


def assert_trains_plainly(model: nn.Module, x: Tensor) -> None:
    plain, fast = (results(model, x, formula) for formula in (True, False))
    assert torch.allclose(plain["y"], fast["y"], atol=1e-4)


def replace(monkeypatch: pytest.MonkeyPatch, name: str, changed: Callable[..., Any]) -> None:
    """Let fused graphs call something else instead of one of their functions, in the sight of the check."""
    before = judging.QUANTIZING[getattr(rewriting, name)]
    monkeypatch.setattr(rewriting, name, changed)
    monkeypatch.setitem(judging.QUANTIZING, changed, before)


def test_a_sound_model_trains_on_codes_and_is_left_as_it_was(x: Tensor) -> None:
    model: Any = prepared(Block(), x)
    model._verdicts.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = torch.random.get_rng_state()
    verdict = model._check_before_training((x,), {})
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert verdict is not None and verdict.distrusted == () and not verdict.reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("kernel", "what"), [("codes_product", "result"), ("codes_product_backward", "gradient")])
def test_a_wrong_product_is_found_and_its_layers_are_called(x, kernel, what, monkeypatch, caplog):
    original = getattr(product, kernel)

    def changed(*args: Any) -> Any:
        """Wrong for the weight of conv3 alone."""
        found = original(*args)
        weight = args[2 if what == "result" else 3]
        if weight.shape[2:] != (1, 1):
            return found
        return found * 1.01 if what == "result" else (found[0], found[1] * 1.1, *found[2:])

    monkeypatch.setattr(product, kernel, changed)
    with caplog.at_level(logging.WARNING, "qat"):
        model: Any = prepared(Block(), x)
    assert distrusted(model) == [("conv3",)]
    assert f"{what} of conv3 differs" in caplog.text
    assert_trains_plainly(model, x)
    graph = model._derive().graph
    assert graph is not None
    assert sum(node.target is product.multiply for node in graph.nodes) == 3  # the others still run on codes


def test_a_wrong_clip_is_found(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(y: Any, quantizer: Any, norm: Any = None, floor: float = 0, *rest: Any) -> Any:
        return norms.quantize_chain(y, quantizer, norm, 0.1 if norm is not None else floor, *rest)

    replace(monkeypatch, "quantize_chain", changed)
    model: Any = prepared(Block(), x)
    (names,) = distrusted(model)
    assert names is not None and {"conv1_quantizer", "conv2_quantizer"} <= set(names)
    assert_trains_plainly(model, x)


def test_a_wrongly_wired_graph_never_runs(x, monkeypatch, caplog):
    original = rewriting.fused_graph

    def crossed(model: Any, distrusted: Any = ()) -> Any:
        graph = original(model, distrusted)
        assert graph is not None
        for node in graph.nodes:
            if node.target is add.quantize_sum:
                node.args = (node.args[0], node.args[0], *node.args[2:])
        return graph

    monkeypatch.setattr("qat.codes.check.judging.fused_graph", crossed)
    with caplog.at_level(logging.WARNING, "qat"):
        model: Any = prepared(residual(), x)
    assert distrusted(model) == [None] and model._derive().run is None
    assert "trains operation by operation: its fused step differs from the plain one: answer 0" in caplog.text


def test_an_exception_of_the_fused_step_is_no_exception_of_training(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    replace(monkeypatch, "quantize_sum", broken)
    model: Any = prepared(residual(), x)
    (verdict,) = model._verdicts.values()
    assert verdict.distrusted is None and "raises RuntimeError: no such kernel" in verdict.reason
    model(x).sum().backward()


@pytest.mark.parametrize("kind", [IndexError, TypeError, RuntimeError])
def test_an_exception_behind_the_check_is_none_of_training(x: Tensor, kind: type[Exception]) -> None:
    model: Any = prepared(residual(), x)

    def broken(*_: Any) -> Any:
        raise kind("of ours")

    model._engine_state.fused = dataclasses.replace(model._derive(), run=broken)
    model(x).sum().backward()
    assert "operation by operation: its derived graph fails (of ours)" in str(qat.explain(model))


def test_every_change_is_checked_anew_and_known_states_are_not(x, model, monkeypatch):
    model(x)
    assert distrusted(model) == [()] and not pickle.loads(pickle.dumps(model))._verdicts  # it may be another machine
    model.a.eval()
    model(x)
    assert len(model._verdicts) == 2
    model.a.train()
    monkeypatch.setattr("qat.codes.graph.judge", None)  # not asked again
    model(x)
    copy.deepcopy(model)(x)


def test_off_means_off(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    monkeypatch.setattr("qat.codes.graph.judge", None)
    model: Any = prepared(Deep(), x)
    model(x)
    assert not model._verdicts and model._derive().run is not None


def test_a_model_without_gradients_is_not_checked_in_inference_mode(x: Tensor) -> None:
    model = unchecked(Block, x)
    with torch.inference_mode():
        with plain_formulas():
            expected = copy.deepcopy(model)(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
    model(x)  # the first step checks what calibration did not see
    assert distrusted(model) == [()]


KERNELS = {name: getattr(norms, name) for name in ("norm_quantize", "norm_quantize_backward")}


def through_clip(grad: Tensor, y: Tensor, norm: Any, *rest: Any) -> Any:
    """The kernel's gradients, and one of what ReLU clips to zero."""
    found = list(KERNELS["norm_quantize_backward"](grad, y, norm, *rest))
    gamma, beta, mean, inverse = norm
    shape = (1, -1, 1, 1)
    z = ((y - mean.view(shape)) * inverse.view(shape)) * gamma.view(shape) + beta.view(shape)
    found[0] = found[0] + torch.where(z < 0, grad * (gamma * inverse).view(shape), 0.0)
    return tuple(found)


def three_for_zero(*args: Any) -> Any:
    codes, qparams = KERNELS["norm_quantize"](*args)
    return torch.where(codes == 0, 3, codes).to(torch.uint8), qparams


CHANGED = [("norm_quantize_backward", through_clip), ("norm_quantize", three_for_zero)]


@pytest.mark.parametrize(("name", "changed"), CHANGED)
def test_what_a_clip_hides_is_seen(name: str, changed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, name, changed)
    model: Any = prepared(Deep(), images())
    assert distrusted(model) == [("a_quantizer", "b_quantizer")]


def test_inputs_of_different_lengths_are_checked_with_integers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = product.codes_product
    monkeypatch.setattr(product, "codes_product", lambda *args: seen.append(args[-1]) or original(*args))
    inputs = {"x": images(), "b": torch.randn(5, 4, 1, 1)[:1]}
    model = qat.prepare(Plain(lambda self, x, b: self.deep(x) + b, deep=Deep()), example_inputs=inputs)
    qat.calibrate(model, [inputs])
    assert seen and min(seen) >= 1


class Counting(nn.Module):
    """Draws, and writes to everything that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.weight, self.average = nn.Parameter(torch.ones(())), torch.zeros(())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(random.random())
        with torch.no_grad():
            self.weight.mul_(0.5)
            self.average += x.mean()
            self.steps = self.steps + 1
        return x * self.weight + np.random.rand()


def test_nothing_of_the_users_moves_and_no_hook_is_called(x: Tensor, model: Any) -> None:
    def drawn_after(work: Callable[[], Any]) -> tuple[float, float]:
        random.seed(3), np.random.seed(3)
        work()
        return random.random(), np.random.rand()

    fired: list[Tensor] = []
    model.norm_b = part = Counting()
    model.a.weight.register_hook(fired.append)
    called: list[int] = []
    model.b.register_forward_hook(lambda *_: called.append(1))
    first, after = drawn_after(lambda: None), drawn_after(lambda: (random.random(), np.random.rand()))
    assert drawn_after(lambda: model(x).sum().backward()) == after
    assert distrusted(model) == [(), ()]
    assert part.seen == [first[0]] and part.weight.item() == 0.5 and float(part.steps) == 1
    assert len(fired) == len(called) == 1
    assert drawn_after(lambda: model(x)) == after


PRUNED = functools.partial(prune.random_unstructured, name="weight", amount=0.5)


@pytest.mark.parametrize("computed", [PRUNED, nn.utils.weight_norm, spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_hooks_compute_are_no_alarm(x: Tensor, model: Any, computed: Callable[[Any], object]) -> None:
    model(x).sum().backward()
    computed(model.b)
    for _ in range(2):
        model(x).sum().backward()
    found = model._derive().verdict
    assert found is not None and found.distrusted == () and not found.reason


def test_one_sample_and_complex_answers_are_checked(x: Tensor) -> None:
    assert distrusted(prepared(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8))) == [()]
    model: Any = prepared(between(lambda layer, x: torch.fft.fft(layer(x)), 8), x)
    model(x).abs().sum().backward()
    assert distrusted(model) == [()]


class Uncopied:
    def __deepcopy__(self, memo: object) -> "Uncopied":
        raise RuntimeError("no copies")


def test_what_cannot_be_run_apart_is_said_once(x: Tensor, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.norm_b = nn.Hardtanh(-1e9, 1e9)
    model.norm_b.uncopied = Uncopied()
    with caplog.at_level(logging.WARNING, "qat"):
        for _ in range(3):
            model(x).sum().backward()
    (line,) = [message for message in caplog.messages if "apart" in message]
    assert line.startswith("trains operation by operation: no step of it can be run apart, RuntimeError: no copies")


def test_a_model_that_only_takes_its_own_batches_is_given_up_after_three(x, model, monkeypatch):
    asked = []
    monkeypatch.setattr("qat.codes.graph.judge", lambda *_: asked.append(1))
    model.norm_b.eval()
    for _ in range(5):
        model(x).sum().backward()
    found = model._derive().verdict
    assert len(asked) == 3 and found is not None and found.reason == "3 times no step of it could be run apart"


def test_threads_that_begin_together_count_every_batch(x: Tensor) -> None:
    fresh = unchecked(Deep, x)
    for _ in range(3):
        model: Any = copy.deepcopy(fresh)
        before = int(model.norm_a.num_batches_tracked)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(model, [x] * 3))
        assert int(model.norm_a.num_batches_tracked) == before + 3
        assert distrusted(model) == [()]


def test_where_hooks_for_saved_tensors_are_forbidden_it_is_checked_all_the_same(x: Tensor, model: Any) -> None:
    model.norm_b.eval()
    with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
        model(x).sum().backward()
    assert len(model._verdicts) == 2


STEP = {
    "answer 0": torch.ones(10), "the gradient of v": torch.ones(5), "the gradient of w": torch.tensor([1.0, torch.inf]),
    "the buffer n": torch.ones(2),
}  # fmt: skip
OTHERS: list[tuple[str, Tensor | None, str]] = [  # what changed, its value (None: it is missing), the fact
    ("answer 0", torch.zeros(10), "differs by 1 of"),
    ("answer 0", None, "is missing"),
    ("the gradient of v", -torch.ones(5), "differs by 2 of"),
    ("the gradient of w", None, "is missing"),
    ("the gradient of u", torch.ones(1), "should not exist"),
    ("the gradient of w", torch.ones(2), "has 0 values that are not finite"),
    ("the gradient of w", torch.tensor([1.0, -torch.inf]), "has 1 values"),
    ("the buffer n", torch.ones(2) * 1.01, "differs by 0.01 of"),
    ("the buffer n", torch.ones(3), "is torch.float32 (3,) instead of torch.float32 (2,)"),
]


@pytest.mark.parametrize(("name", "value", "fact"), OTHERS)
def test_how_two_steps_differ(name: str, value: Tensor | None, fact: str) -> None:
    assert difference(STEP, STEP) is None
    changed = {key: each for key, each in {**STEP, name: value}.items() if each is not None}
    found = difference(STEP, changed)
    assert found is not None and found.startswith(f"{name} {fact}")
