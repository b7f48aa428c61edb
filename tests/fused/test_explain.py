"""`qat.explain`: every reason why something does not train on codes, in whole sentences."""

import copy
import dataclasses
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases_fused import Block, images, prepared
from prepared_case import Plain
from processors import as_processor, untried
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import qat
from qat.fused.functions.products import weight_refusal
from qat.fused.functions.quantizers import codes_refusal
from qat.fused.graph import FusedGraph
from qat.fused.known_modules import module_refusal
from qat.kernels import float_products, kernels_by_formula, plain_formulas
from qat.kernels.cpu import compiler
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.verdict import Verdict
from qat.quantizer import LSQQuantizer, create_quantizer

__all__ = ["as_processor", "untried"]  # fixtures

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

SHOWN = "trains on codes, the fast way; a step was compared with plain training and is the same"
PLAINLY = "operation by operation"
STEPS_BACK = f"the model trains {PLAINLY}: "


def block() -> nn.Module:
    return prepared(Block(), images())


@pytest.fixture
def model() -> nn.Module:
    return block()


def whole(model: nn.Module, inputs: object = None) -> str:
    """The first line."""
    return qat.explain(model, inputs).splitlines()[0]  # type: ignore[arg-type]


def row(model: nn.Module, name: str, inputs: object = None) -> tuple[str, str]:
    """How something trains, and why."""
    for line in qat.explain(model, inputs).splitlines():  # type: ignore[arg-type]
        cells = re.split(r"\s{2,}", line)
        if cells[0] == name:
            return cells[2], " ".join(cells[3:])
    raise AssertionError(f"no row {name}")


def of_model(*layers: nn.Module, x: Tensor, **recipe: qat.QuantSpec) -> nn.Module:
    return prepared(nn.Sequential(*layers), x, qat.QuantRecipe(**recipe))  # type: ignore[arg-type]


def test_a_table_of_layers_and_quantizers_as_they_run(as_processor: Callable[[str], None]) -> None:
    as_processor("vnni")
    lines = qat.explain(block()).splitlines()
    assert lines[0] == f"the model {SHOWN}"
    assert lines[2].split() == ["name", "kind", "trains", "why"]
    assert [line.split()[0] for line in lines[3:7]] == ["input_quantizer", "conv1", "conv1_quantizer", "conv2"]
    assert row(block(), "conv1") == ("on codes, in integers where it pays", "")


def test_it_leaves_the_model_as_it_was() -> None:
    model = block().eval()
    model.get_submodule("bn1").train()
    before = {name: module.training for name, module in model.named_modules()}
    said = qat.explain(model, images())
    assert before == {name: module.training for name, module in model.named_modules()}
    assert said.splitlines()[0] == (
        f"the model is in evaluation, where its graph runs operation by operation; in training it {SHOWN}"
    )


# ---------------------------------------------------------------- the whole model


def test_a_model_that_is_not_calibrated() -> None:
    model = qat.prepare(Block(), example_inputs=images())
    assert whole(model) == f"{STEPS_BACK}it is not calibrated"
    assert row(model, "input_quantizer") == (PLAINLY, "it is not calibrated")
    assert row(model, "conv1") == (PLAINLY, "its operand comes from input_quantizer: it is not calibrated")


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain_formulas is on": plain_formulas,
    "something other than autograd looks at every operation": lambda: FlopCounterMode(display=False),
    "a hook on all modules is registered, which waits for each to be called": (
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None)
    ),
    "autocast is on, and the kernels on the CPU compute in float32": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ),
    "there is no C library (the log says why)": lambda: mock.patch.object(compiler, "library", lambda: None),
}


@pytest.mark.parametrize("reason", SURROUNDINGS)
def test_what_surrounds_a_model(model: Any, reason: str) -> None:
    with SURROUNDINGS[reason]():
        assert whole(model) == STEPS_BACK + reason


def test_a_row_says_what_is_switched_off() -> None:
    with plain_formulas():
        assert row(block(), "conv1") == (PLAINLY, "plain_formulas is on")


def test_other_dtypes() -> None:
    wide = block().double()
    assert whole(wide, images().double()) == f"{STEPS_BACK}its input is torch.float64 on cpu"
    assert row(wide, "conv1")[1] == "its weight is torch.float64 on cpu, or of a subclass of torch.Tensor"
    assert row(wide, "input_quantizer")[1] == (
        "its scale or zero point is no contiguous float32 tensor of the device that kernels run on"
    )


def test_no_memory() -> None:
    assert whole(block().to("meta")) == f"{STEPS_BACK}it has no memory to compute in (device meta)"


def test_what_a_self_check_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def found(verdict: Verdict) -> None:
        assert isinstance(model, FusedGraph)
        model._verdicts.clear()
        type(model)._fused = None
        model._verdicts[model._derive().key] = verdict
        type(model)._fused = None

    found(Verdict(("conv2",), "the result of conv2 differs by up to 1"))
    assert whole(model) == "the model trains on codes but for conv2: the result of conv2 differs by up to 1"
    assert row(model, "conv2") == (PLAINLY, "its self-check found a difference")
    reason = "its fused step raises ValueError: no"
    found(Verdict(None, reason))
    assert whole(model) == STEPS_BACK + reason
    assert row(model, "conv1") == (PLAINLY, reason)


def test_before_a_self_check_and_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    model = block()
    assert whole(model) == "the model trains on codes, without a self-check (QAT_SELF_CHECK=off)"
    monkeypatch.delenv("QAT_SELF_CHECK")
    assert whole(model) == (
        "the model trains on codes as soon as a self-check (calibrate, self_check, a step)"
        " has shown that to be the same"
    )


def test_by_formula() -> None:
    with kernels_by_formula():
        assert row(block(), "conv1") == ("on codes, by formula", "")


def test_a_copy_of_qat_without_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedGraph, "_explain", PreparedGraph._explain)
    assert whole(model) == f"{STEPS_BACK}this copy of qat has no qat.fused"
    assert row(model, "conv1") == (PLAINLY, "")


# ---------------------------------------------------------------- a layer and a quantizer


# Reason, the change, and the row that names it.
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "it is in evaluation": (lambda m: m.conv1.eval(), "conv1"),
    "its weight_quantizer: it is in evaluation": (lambda m: m.conv1.weight_quantizer.eval(), "conv1"),
    "its weight_quantizer: it observes a range": (
        lambda m: setattr(m.conv1.weight_quantizer, "observer", object()), "conv1",
    ),
    "a hook waits for its call, or its forward was replaced": (
        lambda m: m.conv1.register_forward_hook(lambda *_: None), "conv1",
    ),
    "its operand comes from input_quantizer: it is in evaluation": (lambda m: m.input_quantizer.eval(), "conv1"),
    "it quantizes its input itself": (
        lambda m: setattr(m.conv1, "input_quantizer", copy.deepcopy(m.input_quantizer)), "conv1",
    ),
    "it is being calibrated": (lambda m: setattr(m.conv1, "calibrating", True), "conv1"),
    "pool, which reads it, may write into its output": (
        lambda m: m.pool.register_forward_hook(lambda *_: None), "conv1_quantizer",
    ),
    "its weight is not contiguous": (lambda m: setattr(m.head.weight, "data", torch.randn(32, 5).T), "head"),
}  # fmt: skip


@pytest.mark.parametrize("reason", CHANGES)
def test_what_became_of_a_module(model: Any, reason: str) -> None:
    change, name = CHANGES[reason]
    change(model)
    assert row(model, name) == (PLAINLY, reason)


def test_rules_and_grids(as_processor: Callable[[str], None]) -> None:
    as_processor("vnni")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    linear = nn.Linear(16, 16)

    def why(name: str, **specs: qat.QuantSpec) -> str:
        return row(of_model(linear, x=x, **specs), name)[1]

    assert why("0", weight=qat.QuantSpec(rule="power_of_two")) == (
        "its weight_quantizer: kernels compute the rule 'lsq', and PowerOfTwoQuantizer computes something else"
    )
    assert why("0", weight=qat.QuantSpec(ewgs="fixed")) == (
        "its weight_quantizer: ewgs='fixed' corrects its gradient, which kernels do not"
    )
    assert why("0", weight=qat.QuantSpec(bits=12)) == "its weight_quantizer: it has 12 bits, and a code has 8"
    assert why("0", weight=qat.QuantSpec(granularity="group", group_size=4)) == (
        "its weight_quantizer: it has a scale per group of inputs, and kernels take one per row or one in all"
    )
    assert why("input_quantizer", activation=qat.QuantSpec(bits=12)) == "it has 12 bits, and a code has 8"
    assert why("0") == ""
    model = of_model(linear, x=x)
    quantizer = model.get_submodule("0.weight_quantizer")
    quantizer.spec = dataclasses.replace(quantizer.spec, symmetric=False)  # type: ignore[arg-type, assignment]
    assert row(model, "0")[1] == (
        "its weight_quantizer: its grid is int8 narrow affine per channel,"
        " and kernels multiply by signed symmetric weights"
    )


def test_layers_that_multiply_in_no_kernel() -> None:
    x = images()
    assert row(of_model(nn.ConvTranspose2d(3, 16, 3), x=x), "0") == (
        PLAINLY, "kernels multiply in convolutions and linear layers only",
    )  # fmt: skip
    padded = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
    assert row(of_model(padded, x=x), "0") == (PLAINLY, "its padding is no number of zeros")


def test_methods_that_somebody_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = block(), LSQQuantizer.gradient_factor
    monkeypatch.setattr(LSQQuantizer, "gradient_factor", lambda self, x: original(self, x))
    assert row(model, "input_quantizer") == (
        PLAINLY, "a method of LSQQuantizer that kernels stand in for was replaced",
    )  # fmt: skip


def test_the_same_reasons_of_parts_alone() -> None:
    assert module_refusal(nn.Tanh()) == "kernels do not compute what Tanh does"
    assert weight_refusal(torch.empty(0, 3)) == "its weight is empty"
    channels = create_quantizer(qat.QuantSpec(granularity="channel"), "weight", (4, 1))
    assert codes_refusal(channels) == "it has a scale per channel, and codes have one"


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
    assert row(model, "bmm")[1] == "it is not called with its two operands alone"
    constant = "it quantizes what is the same in every step"
    assert row(model, "other_quantizer") == (PLAINLY, constant)
    assert row(model, "matmul") == (PLAINLY, f"its operand comes from other_quantizer: {constant}")


def test_what_a_quantizer_is_computed_with() -> None:
    """The BatchNorm, the sum and the activation before it: a slope that is not fused is missing here."""
    x = torch.randn(4, 3, 8, 8)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.silu(self.norm(self.first(x)))
        y = F.relu(self.second(y) + y)
        return self.last(self.leaky(self.third(y)))

    convs = {name: nn.Conv2d(4 if name != "first" else 3, 4, 1) for name in ("first", "second", "third", "last")}
    others = {"norm": nn.BatchNorm2d(4), "silu": nn.SiLU(), "leaky": nn.LeakyReLU(0.1)}
    model = prepared(Plain(forward, **convs, **others), x)
    assert row(model, "first_quantizer") == ("on codes", "in one pass with norm")
    assert row(model, "silu_quantizer") == ("on codes", "in one pass with silu")
    assert row(model, "add_quantizer") == ("on codes", "in one pass with add, relu")
    assert "leaky" not in row(model, "leaky_quantizer")[1]


def test_what_nothing_on_codes_reads() -> None:
    model = of_model(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4), x=images())
    assert row(model, "0_quantizer") == (PLAINLY, "nothing that computes on codes reads it")


def test_layers_outside_of_graphs_and_inside_of_layers() -> None:
    def loop(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        while x.sum() > 1e9:
            x = x / 2
        return self.body(x)  # type: ignore[no-any-return]

    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = prepared(Plain(loop, first=nn.Linear(4, 4), body=body), torch.randn(4, 4))
    assert row(model, "first") == (PLAINLY, "it stands outside of every traced graph")
    assert row(model, "body.0") == ("on codes, in float", "float is faster for sums of fewer than 16 products, here 4")
    assert whole(model) == f"body {SHOWN}"
    lone = qat.QuantLinear(4, 4)
    assert whole(lone) == f"{STEPS_BACK}it has no traced graph"
    gru = prepared(nn.Sequential(nn.GRU(4, 4)), torch.randn(3, 2, 4))
    assert whole(gru) == f"{STEPS_BACK}no layer of it takes codes"
    assert row(gru, "0.product_ih_l0") == (PLAINLY, "it runs inside of 0, which is one step of the graph")


# ---------------------------------------------------------------- integers


def test_where_integers_pay(as_processor: Callable[[str], None]) -> None:
    as_processor("vnni")
    model = block()
    assert row(model, "conv1", images()) == ("on codes, in integers", "")
    assert row(model, "conv3", images()) == ("on codes, in integers", "")
    few = ("on codes, in float", "float is faster for fewer than 160 rows, here 8")
    assert row(model, "head", images()) == few
    assert row(model, "head") == ("on codes, in integers where it pays", "")
    with float_products():
        assert row(model, "conv1") == ("on codes, in float", "float_products is on")
    as_processor("no-vnni")
    assert row(model, "conv1") == (
        "on codes, in float", "this processor multiplies such integers inexactly (it has no VNNI)",
    )  # fmt: skip


def test_sizes_that_never_pay() -> None:
    def why(layer: nn.Module, x: Tensor, inputs: Tensor | None = None) -> str:
        return row(of_model(layer, x=x), "0", inputs)[1]

    x = images()
    assert why(nn.Conv2d(3, 6, 3, groups=3), x) == "it is depthwise with several outputs for an input"
    assert (
        why(nn.Conv2d(4, 8, 1, groups=2), x[:, [0, 1, 2, 0]])
        == "float is faster for sums of fewer than 32 products, here 2"
    )
    assert why(nn.Conv2d(3, 8, 1), x) == "float is faster for sums of fewer than 16 products, here 3"
    assert why(nn.Conv1d(3, 8, 9), x[:, :, 0]) == "integers multiply in linear layers and Conv2d, and it has 1 axes"
    assert (
        why(nn.Conv2d(3, 3, 3, groups=3), x, x)
        == "float is faster for inputs of fewer than 1572864 elements, here 6144"
    )
    big = torch.zeros(2, 65537)
    big[0, 0], big[0, 1] = 1.0, -1.0
    assert why(nn.Linear(65537, 2), big) == "it sums 65537 products, and int32 holds 65536"
