"""Operators and all their options between two integer layers answer in ONNX Runtime as the trained model does.

Each is read at every quantizer, and run as the file is: with ONNX Runtime's optimisations in a default and in an exact
session, and without them. What differs by more than near-ties is wrong.
"""

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qat
from tests.export.sweep.operators import CHOSEN, OPERATORS, REFUSED, Shape
from tests.export.sweep.running import GRIDS, Branches, wrong
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOGETHER = 16
"""How many operators share an export."""


def groups(rows: list[tuple[Shape, str]]) -> list[tuple[Shape, list[str]]]:
    shapes = dict.fromkeys(shape for shape, _ in rows)
    of_shape = {shape: [source for each, source in rows if each == shape and source not in REFUSED] for shape in shapes}
    return [(shape, all_[n : n + TOGETHER]) for shape, all_ in of_shape.items() for n in range(0, len(all_), TOGETHER)]


def check(shape: Shape, sources: list[str], grid: str, whole: bool, path: Path) -> None:
    torch.manual_seed(len(sources))
    found = wrong(sources, shape, grid, whole, path)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(("shape", "sources"), groups(CHOSEN))
@pytest.mark.parametrize(("grid", "whole"), [("affine", False), ("symmetric", True)])
def test_fused_operators_are_the_model(shape, sources, grid, whole, tmp_path):
    check(shape, sources, grid, whole, tmp_path / "model.onnx")


def rotated() -> list[tuple[Shape, list[str], str, bool]]:
    """Every group on the default grid, and on one of the others in turn."""
    turns = itertools.cycle(itertools.product(GRIDS, (False, True)))
    of_all = groups(OPERATORS)
    return [(*each, *turn) for each in of_all for turn in (("affine", False), next(turns))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shape", "sources", "grid", "whole"), rotated())
def test_all_operators_are_the_model(shape: Shape, sources: list[str], grid: str, whole: bool, tmp_path: Path) -> None:
    check(shape, sources, grid, whole, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_be_written_is_refused_in_a_sentence(source: str, tmp_path: Path) -> None:
    shape = next(shape for shape, each in OPERATORS if each == source)
    x = torch.randn(8, *shape[1:])
    model = quantized(Branches([source], shape), x)
    with pytest.raises(ValueError, match="^export_onnx: .*" + REFUSED[source]):
        qat.export_onnx(model, tmp_path / "model.onnx", x)


def resized(**options: Any) -> nn.Module:
    return Plain(lambda self, x: F.interpolate(x, mode="bilinear", antialias=True, **options))


@pytest.mark.parametrize(("middle", "lost"), [
    (nn.AvgPool2d(2, divisor_override=3), "middle: torch.onnx loses divisor_override=3; multiply"),
    (resized(scale_factor=0.6), "torch.onnx loses scale.*; interpolate to a size"),
    (resized(size=3, align_corners=True), "torch.onnx loses align_corners=True"),
])  # fmt: skip
def test_an_option_that_the_exporter_loses_is_refused_by_name(middle: nn.Module, lost: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 7, 9)
    layers = OrderedDict(first=nn.Conv2d(3, 4, 1), middle=middle, last=nn.Conv2d(4, 4, 1))
    model = quantized(nn.Sequential(layers), x)
    with pytest.raises(ValueError, match=f"^export_onnx: .*{lost}"):
        qat.export_onnx(model, tmp_path / "model.onnx", x)
