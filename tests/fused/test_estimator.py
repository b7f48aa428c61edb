"""Subclasses of a rule: they train on codes while they compute what the rule computes."""

import pytest
import torch
from torch import Tensor, nn

from qat.fused.plan import CodesPlan
from qat.kernels.cpu import compiler
from qat.quantizer import LSQQuantizer
from qat.quantizer.base import estimator_of
from qat.spec import QuantSpec
from qat.tracing.in_place import has_own_memory
from qat.tracing.nodes import submodule_of
from tests.references.cases_fused import Block, assert_same, images, prepared

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


class Named(LSQQuantizer):
    """Adds a method, and computes the same."""

    def label(self) -> str:
        return "mine"


class Coarser(LSQQuantizer):
    """Computes something else."""

    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x * 0.5) * 2


class _Halving:
    def bounds(self) -> tuple[int, int]:
        return 0, 127


class Mixed(_Halving, LSQQuantizer):  # type: ignore[misc]
    """Takes from a mixin what computes something else."""


def of_kind(kind: type[LSQQuantizer]) -> nn.Module:
    """A model whose quantizers are all of a class."""
    model = prepared(Block(), images())
    for module in model.modules():
        if type(module) is LSQQuantizer:
            module.__class__ = kind
    return model


def counts(kind: type[LSQQuantizer]) -> tuple[int, int, bool]:
    """Quantizers and layers on codes where all quantizers are of a class; whether their outputs own their memory."""
    model = of_kind(kind)
    plan = CodesPlan(model)
    nodes = [node for node in plan.nodes if isinstance(submodule_of(model, node), kind)]
    return len(plan.quantizers), len(plan.layers), bool(nodes) and all(has_own_memory(node, model) for node in nodes)


def test_a_subclass_that_adds_a_method_keeps_the_fast_path() -> None:
    expected = counts(LSQQuantizer)
    assert expected[1] > 0 and expected[2] and counts(Named) == expected


@pytest.mark.parametrize("kind", [Coarser, Mixed])
def test_a_subclass_that_computes_something_else_loses_it(kind: type[LSQQuantizer]) -> None:
    assert counts(kind) == (0, 0, False)


def test_it_trains_as_its_plain_graph_does() -> None:
    for kind in (Named, Coarser):
        assert_same(of_kind(kind), images())


def test_a_subclass_may_declare_an_estimator_itself() -> None:
    class Own(Coarser):
        estimator = "mine"

    assert [estimator_of(kind(QuantSpec())) for kind in (Own, Coarser, Mixed, Named)] == ["mine", None, None, "lsq"]
    assert estimator_of(torch.nn.ReLU()) is None
