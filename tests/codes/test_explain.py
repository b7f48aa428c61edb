"""`qat.explain`: how everything trains, and the fact that decides it."""

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import qat
from qat import QuantSpec
from qat.codes.graph import FusedGraph
from qat.codes.operators.grid import codes_refusal
from qat.codes.operators.product import weight_refusal
from qat.codes.training.watched import module_refusal
from qat.codes.verdict import Verdict
from qat.kernels import float_products, plain_formulas
from qat.kernels.cpu import compiler
from qat.preparation.prepared_graph import PreparedGraph
from qat.quantizer import LSQQuantizer, create_quantizer
from qat.quantizer.registry import estimator_of
from tests.references.cases_fused import images, prepared
from tests.references.nets import Block
from tests.references.prepared_case import Plain
from tests.references.processors import as_processor, untried

__all__ = ["as_processor", "untried"]  # fixtures

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

PLAINLY = "operation by operation"
ON_CODES = "trains on codes, the fast way"
IN_INTEGERS = "on codes, in integers"


def whole(model: nn.Module, inputs: Any = None) -> str:
    return qat.explain(model, inputs).partition("\n")[0]


def row(model: nn.Module, name: str, inputs: Any = None) -> tuple[str, str]:
    """How something trains, and why."""
    for line in qat.explain(model, inputs).splitlines():
        cells = re.split(r"\s{2,}", line)
        if cells[0] == name:
            return cells[2], " ".join(cells[3:])
    raise AssertionError(f"no row {name}")


def assert_plain(found: tuple[str, str], fact: str) -> None:
    how, why = found
    assert how == PLAINLY and fact in why


def test_a_table_of_layers_and_quantizers_as_they_run(as_processor: Callable[[str], None]) -> None:
    as_processor("vnni")
    model = prepared(Block(), images())
    first, _, names, *lines = qat.explain(model).splitlines()
    assert first.startswith(f"the model {ON_CODES}") and names.split() == ["name", "kind", "trains", "why"]
    assert [line.split()[0] for line in lines[:4]] == ["input_quantizer", "conv1", "conv1_quantizer", "conv2"]
    assert row(model, "conv1") == row(model, "head") == (f"{IN_INTEGERS} where it pays", "")
    assert row(model, "conv1", images()) == row(model, "conv3", images()) == (IN_INTEGERS, "")
    how, why = row(model, "head", images())
    assert how == "on codes, in float" and "fewer than 160 rows, here 8" in why
    with float_products():
        assert row(model, "conv1") == ("on codes, in float", "float_products is on")
    as_processor("no-vnni")
    how, why = row(model, "conv1")
    assert how == "on codes, in float" and "VNNI" in why


def test_it_leaves_the_model_as_it_was(model: Any) -> None:
    model.eval().bn1.train()
    before = {name: module.training for name, module in model.named_modules()}
    first = whole(model, images())
    assert before == {name: module.training for name, module in model.named_modules()}
    assert "is in evaluation" in first and f"in training it {ON_CODES}" in first


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain_formulas": plain_formulas,
    "looks at every operation": lambda: FlopCounterMode(display=False),
    "a hook on all modules": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no C library": lambda: mock.patch.object(compiler, "library", lambda: None),
}


@pytest.mark.parametrize("fact", SURROUNDINGS)
def test_what_surrounds_a_model(model: Any, fact: str) -> None:
    with SURROUNDINGS[fact]():
        assert PLAINLY in whole(model) and fact in whole(model)
        assert_plain(row(model, "conv1"), fact)


def test_a_model_that_is_not_calibrated() -> None:
    model = qat.prepare(Block(), example_inputs=images())
    assert PLAINLY in whole(model) and "not calibrated" in whole(model)
    assert_plain(row(model, "conv1"), "input_quantizer: it is not calibrated")


def test_other_dtypes_and_no_memory(model: Any) -> None:
    assert "meta" in whole(copy.deepcopy(model).to("meta"))
    wide = model.double()
    assert "torch.float64" in whole(wide, images().double())
    assert_plain(row(wide, "conv1"), "torch.float64")
    assert_plain(row(wide, "input_quantizer"), "not a contiguous float32")


def test_what_a_self_check_found(model: Any) -> None:
    def found(verdict: Verdict) -> None:
        model._verdicts.clear()
        model._engine_state.fused = None
        model._verdicts[model._derive().key] = verdict
        model._engine_state.fused = None

    found(Verdict(("conv2",), "it is off by 1"))
    assert whole(model) == "the model trains on codes but for conv2: it is off by 1"
    assert_plain(row(model, "conv2"), "self-check")
    found(Verdict(None, "it raises"))
    assert whole(model) == f"the model trains {PLAINLY}: it raises"
    assert_plain(row(model, "conv1"), "it raises")
    earlier = list(model._verdicts)
    found(Verdict())
    assert earlier and qat.summary(model).splitlines()[-1].startswith(f"the model {ON_CODES}")


def test_before_a_self_check_and_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    model = prepared(Block(), images())
    assert whole(model) == "the model trains on codes, without a self-check (QAT_SELF_CHECK=off)"
    monkeypatch.delenv("QAT_SELF_CHECK")
    assert "on codes as soon as a self-check" in whole(model)


def test_a_copy_of_qat_without_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedGraph, "_fused_engine", PreparedGraph._fused_engine)
    assert PLAINLY in whole(model) and "no qat.codes" in whole(model)
    assert row(model, "conv1") == (PLAINLY, "")


class Named(LSQQuantizer):
    def label(self) -> str:
        return "mine"


class Coarser(LSQQuantizer):
    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x * 0.5) * 2


class Own(Coarser):
    estimator = "mine"


class _Halving:
    def bounds(self) -> tuple[int, int]:
        return 0, 127


class Mixed(_Halving, LSQQuantizer):  # type: ignore[misc]
    """Takes from a mixin what computes something else."""


def test_a_subclass_that_adds_a_method_keeps_the_fast_path_and_may_declare_an_estimator(model: Any) -> None:
    for module in model.modules():
        if type(module) is LSQQuantizer:
            module.__class__ = Named
    assert row(model, "conv1")[0].startswith("on codes")
    assert [estimator_of(kind(QuantSpec())) for kind in (Own, Coarser, Mixed, Named)] == ["mine", None, None, "lsq"]
    assert estimator_of(nn.ReLU()) is None


CHANGES: list[tuple[Callable[[Any], object], str, str]] = [  # the change, the row that names it, the fact
    (lambda m: m.conv1.eval(), "conv1", "it is in evaluation"),
    (lambda m: m.conv1.weight_quantizer.eval(), "conv1", "its weight_quantizer: it is in evaluation"),
    (lambda m: setattr(m.conv1.weight_quantizer, "observer", object()), "conv1", "observes a range"),
    (lambda m: m.conv1.register_forward_hook(lambda *_: None), "conv1", "a hook"),
    (lambda m: m.input_quantizer.eval(), "conv1", "input_quantizer: it is in evaluation"),
    (lambda m: setattr(m.conv1, "input_quantizer", copy.deepcopy(m.input_quantizer)), "conv1", "its input itself"),
    (lambda m: setattr(m.conv1, "calibrating", True), "conv1", "being calibrated"),
    (lambda m: m.pool.register_forward_hook(lambda *_: None), "conv1_quantizer", "pool"),
    (lambda m: setattr(m.head.weight, "data", torch.randn(32, 5).T), "head", "not contiguous"),
    (lambda m: qat.disable_fake_quant(m), "conv1", "switched off"),
    (lambda m: setattr(m.head.weight_quantizer, "spec", QuantSpec(symmetric=False)), "head", "symmetric weights"),
    (lambda m: setattr(m.input_quantizer, "__class__", Coarser), "input_quantizer", "Coarser computes something else"),
    (lambda m: setattr(m.input_quantizer, "__class__", Mixed), "input_quantizer", "Mixed computes something else"),
]


@pytest.mark.parametrize(("change", "name", "fact"), CHANGES, ids=[fact for *_, fact in CHANGES])
def test_what_became_of_a_module(model: Any, change: Callable[[Any], object], name: str, fact: str) -> None:
    change(model)
    assert_plain(row(model, name), fact)


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
LINEAR, REFLECTING = (nn.Linear(16, 16),), nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
OF_MODELS: list[tuple[tuple[nn.Module, ...], Tensor, dict[str, QuantSpec], str, str]] = [
    # layers, input, recipe, the row that names the fact, the fact
    (LINEAR, X, {"weight": QuantSpec(rule="power_of_two")}, "0", "its weight_quantizer: .*PowerOfTwoQuantizer"),
    (LINEAR, X, {"weight": QuantSpec(ewgs="fixed")}, "0", "its weight_quantizer: .*ewgs='fixed'"),
    (LINEAR, X, {"weight": QuantSpec(bits=12)}, "0", "its weight_quantizer: .*12 bits"),
    (LINEAR, X, {"weight": QuantSpec(granularity="group", group_size=4)}, "0", "its weight_quantizer: .*per group"),
    (LINEAR, X, {"activation": QuantSpec(bits=12)}, "input_quantizer", "12 bits"),
    ((nn.ConvTranspose2d(3, 16, 3),), images(), {}, "0", "convolutions and linear layers only"),
    ((REFLECTING,), images(), {}, "0", "padding"),
    ((nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4)), images(), {}, "0_quantizer", "nothing that computes on codes reads it"),
]


@pytest.mark.parametrize(("layers", "x", "recipe", "name", "fact"), OF_MODELS, ids=[fact for *_, fact in OF_MODELS])
def test_rules_grids_and_layers(layers, x, recipe, name, fact):
    how, why = row(prepared(nn.Sequential(*layers), x, qat.QuantRecipe(**recipe)), name)  # type: ignore[arg-type]
    assert how == PLAINLY and re.match(fact if fact.startswith("its") else f".*{fact}", why)


def test_methods_that_somebody_replaced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LSQQuantizer.gradient_factor
    monkeypatch.setattr(LSQQuantizer, "gradient_factor", lambda self, x: original(self, x))
    assert_plain(row(model, "input_quantizer"), "a method of LSQQuantizer")


def test_the_same_reasons_of_parts_alone() -> None:
    channels = create_quantizer(QuantSpec(granularity="channel"), "weight", (4, 1))
    assert "Tanh" in str(module_refusal(nn.Tanh())) and "empty" in str(weight_refusal(torch.empty(0, 3)))
    assert "per channel" in str(codes_refusal(channels))


def test_products_of_activations() -> None:
    def attend(self: Any, x: Tensor) -> Tensor:
        scores = torch.softmax(self.first(x) @ self.second(x).mT, -1)
        return F.dropout(scores, 0.0, self.training) @ self.second(x)

    def products(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(self.first(x), mat2=self.second(x)), self.second(x) @ self.other

    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    model = prepared(Plain(attend, **layers), torch.randn(4, 6, 8))
    assert row(model, "matmul") == row(model, "matmul_1") == ("on codes", "")
    model = prepared(Plain(products, **layers, other=nn.Parameter(torch.ones(8, 8))), torch.randn(4, 8, 8))
    assert row(model, "bmm") == ("on codes", "")  # by keyword too
    assert_plain(row(model, "other_quantizer"), "the same in every step")
    assert_plain(row(model, "matmul"), "other_quantizer: it quantizes what is the same in every step")


def test_what_a_quantizer_is_computed_with() -> None:
    """The BatchNorm, the sum and the activation before it: a slope that is not fused is missing here."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        y = F.relu(self.second(y) + y)
        return self.last(self.leaky(self.third(y)))

    convs = {name: nn.Conv2d(4, 4, 1) for name in ("second", "third", "last")} | {"first": nn.Conv2d(3, 4, 1)}
    others = {"norm": nn.BatchNorm2d(4), "act": nn.Hardswish(), "leaky": nn.LeakyReLU(0.1)}
    model = prepared(Plain(forward, **convs, **others), torch.randn(4, 3, 8, 8))
    for name, fused in (("first", "norm"), ("act", "act"), ("add", "add, relu")):
        assert row(model, f"{name}_quantizer") == ("on codes", f"in one pass with {fused}")
    assert "leaky" not in row(model, "leaky_quantizer")[1]


def test_layers_outside_of_graphs_and_inside_of_layers() -> None:
    def loop(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        while x.sum() > 1e9:
            x = x / 2
        return self.body(x)  # type: ignore[no-any-return]

    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = prepared(Plain(loop, first=nn.Linear(4, 4), body=body), torch.randn(4, 4))
    assert_plain(row(model, "first"), "outside of every traced graph")
    assert row(model, "body.0")[0] == "on codes, in float" and whole(model).startswith(f"body {ON_CODES}")
    assert "no traced graph" in whole(qat.QuantLinear(4, 4))
    gru = prepared(nn.Sequential(nn.GRU(4, 4)), torch.randn(3, 2, 4))
    assert "no layer of it takes codes" in whole(gru)
    assert_plain(row(gru, "0.product_ih_l0"), "inside of 0")
