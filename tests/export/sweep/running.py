"""Runs operators between two integer layers in ONNX Runtime, and judges every integer of their results."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export.onnxruntime.session import default_is_exact, open_session, run_session
from qat.export.onnxruntime.verification import LayerComparison
from qat.integers.following import LayerDifference, _difference
from qat.preparation.operations import grid_of
from qat.quantizer import Quantizer

GRIDS = {
    "affine": qat.QuantRecipe(),
    "symmetric": qat.QuantRecipe(activation=qat.QuantSpec(signed=True, symmetric=True)),
    "signed": qat.QuantRecipe(activation=qat.QuantSpec(signed=True, symmetric=False)),
    "four bits": qat.QuantRecipe(activation=qat.QuantSpec(bits=4)),
    "tensorrt": qat.QuantRecipe(target="tensorrt"),
    "openvino": qat.QuantRecipe(target="openvino"),
}
SESSIONS: dict[str, dict[str, Any]] = {
    "default": {"exact": False}, "exact": {"exact": True}, "unoptimised": {"optimize": False}
}  # fmt: skip


class Branch(nn.Module):
    """An operator between two layers; the last one hands on what it reads, so that an answer shows the integers."""

    def __init__(self, source: str, shape: Sequence[int]) -> None:
        super().__init__()
        channels = shape[-1] if len(shape) == 3 and shape[1] == 6 else shape[1]
        kind = nn.Linear if channels == shape[-1] else (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        self.a, self.b = (kind(channels, channels, *(() if kind is nn.Linear else (1,))) for _ in range(2))
        names = {"torch": torch, "F": F, "nn": nn, "C": channels}
        self.module = eval(source, names) if source.startswith("nn.") else None
        self.operator = None if self.module else eval(f"lambda x, y: {source}", names)
        with torch.no_grad():
            result = self.eval().operate(torch.randn(shape), torch.randn(shape))
        if result.dim() == 4:
            self.end: nn.Module = nn.Conv2d(result.shape[1], result.shape[1], 1, bias=False)
        else:
            self.end = nn.Linear(result.shape[-1], result.shape[-1], bias=False)
        with torch.no_grad():
            self.end.weight.copy_(torch.eye(len(self.end.weight)).reshape(self.end.weight.shape))

    def operate(self, x: Tensor, y: Tensor) -> Tensor:
        return self.operator(x, y) if self.module is None else self.module(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.operate(self.a(x), self.b(x)))


class Branches(nn.Module):
    """Several operators that read one tensor: one export for all."""

    def __init__(self, sources: Sequence[str], shape: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(source, shape) for source in sources)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(x) for branch in self.branches)


@dataclass(frozen=True)
class Finding:
    source: str
    where: str
    wrong: LayerDifference

    def __str__(self) -> str:
        share, each = self.wrong.beyond_ties / self.wrong.elements, self.wrong
        return f"{self.source} [{self.where}]: {share:.1%} beyond ties, by up to {each.largest} levels ({each.name})"


def learned(model: nn.Module, whole: bool) -> None:
    """Give every quantizer of activations a scale and a zero point as training would, or a scale of 1 / n."""
    for quantizer in model.modules():
        if isinstance(quantizer, Quantizer) and quantizer.role == "activation":
            with torch.no_grad():
                scale = quantizer.grid()[0] * float(torch.empty(()).uniform_(0.7, 1.2))
                quantizer.scale.copy_(1 / (1 / scale).round() if whole and scale < 0.4 else scale)
                if quantizer.zero_point is not None:
                    moved = quantizer.zero_point + torch.randint(-9, 10, ())
                    quantizer.zero_point.copy_(moved.clamp(*quantizer.bounds()))


def prepared(sources: Sequence[str], shape: Sequence[int], grid: str, whole: bool) -> tuple[nn.Module, Tensor]:
    x = torch.randn(8, *shape[1:])
    model = qat.prepare(Branches(sources, shape).eval(), GRIDS[grid], x)
    qat.calibrate(model, [x])
    learned(model, whole)
    return model.eval(), x * 1.3


def keep(read: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Tensor]) -> None:
    read[name] = args[0]


def wrong(sources: Sequence[str], shape: Sequence[int], grid: str, whole: bool, path: Path) -> list[Finding]:
    """Every operator whose integers are not torch's, where its file is read at each quantizer, and where it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = prepared(sources, shape, grid, whole)
        qat.export_onnx(model, path, x)
    ends = [next(n for n in model.graph.nodes if n.target == f"branches.{i}.end") for i in range(len(sources))]
    names = [str(grid_of(node.args[0], model).target) for node in ends]
    answers = {name: run_session(open_session(path, **each), x) for name, each in SESSIONS.items()}
    found = []
    for optimize in (True, False):
        comparison, read = LayerComparison(path, model, optimize), dict[str, Tensor]()
        for name in set(names):
            comparison.model.get_submodule(name).register_forward_pre_hook(partial(keep, read, name))
        differences, _ = comparison.follow(x)
        for each in differences:
            if each.beyond_ties:
                number = re.findall(r"branches\.(\d+)", each.name)
                found.append(Finding(sources[int(number[0])] if number else "x",
                                     f"read, {'optimised' if optimize else 'plain'}", each))  # fmt: skip
        # Without VNNI a default session adds pairs of products in 16 bits, which these grids overflow.
        optimised = ("default", "exact") if default_is_exact() else ("exact",)
        for session in optimised if optimize else ("unoptimised",):
            for number, (source, name) in enumerate(zip(sources, names, strict=True)):
                quantizer, answer = comparison.model.get_submodule(name), answers[session][number]
                scale, zero_point = quantizer.grid()
                moved = ends[number].args[0]
                if moved.target != name:
                    continue
                theirs = (answer / scale + zero_point).round()
                if theirs.shape != read[name].shape:
                    found.append(Finding(source, f"{session}: {theirs.shape}", LayerDifference(name, 1, 1, 1, 1)))
                    continue
                each = _difference(name, quantizer, read[name], theirs)
                if each.beyond_ties:
                    found.append(Finding(source, session, each))
    return found
