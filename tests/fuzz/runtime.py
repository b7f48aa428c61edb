"""Compares evaluation with runtimes, layer by layer: each layer gets the integers that the runtime computed."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qat
from qat.export import compare_litert_layers
from qat.export.litert.exporter import UnwritableWarning
from qat.export.litert.file import ReadFile
from qat.export.onnxruntime.session import default_is_exact
from qat.export.onnxruntime.verification import LayerComparison
from qat.integers.following import LayerDifference

ROUNDING = 1e-8
"""A step so small has values that are rounding alone: the mean of what an InstanceNorm centred."""


def against_runtime(model: Any, x: tuple[Tensor, ...]) -> str | None:
    """What differs in ONNX Runtime, in an exact session and in a default one, or None; model: a prepared one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        qat.export_onnx(model, path, x)
        for default in (False, True) if default_is_exact() else (False,):
            comparison = LayerComparison(path, model, default_session=default)
            layers, outputs = comparison.follow(x)
            wrong = _beyond_ties([*layers, *comparison.fused(x, [theirs for _, theirs in outputs])], model)
            if wrong is not None:
                return f"{'default' if default else 'exact'} session: {wrong}"
            for ours, theirs in outputs:
                gap = (ours - theirs).norm() / ours.norm().clamp(min=1e-3)
                if not gap <= 1e-4 and not torch.equal(ours, theirs):
                    return f"output differs by {float(gap):.1e}"
    return None


def against_litert(float_model: nn.Module, x: tuple[Tensor, ...]) -> str | None:
    """What differs in LiteRT's two sets of kernels, or None.

    Raises:
        ValueError: for a model that LiteRT does not take.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnwritableWarning)  # export_litert says it again
        model = qat.prepare(float_model, qat.QuantRecipe(target="litert"), example_inputs=x)
    qat.calibrate(model, [(x,)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        qat.export_litert(model.eval(), path, x, batch=len(x[0]))  # slices of a batch are computed too
        if "RESIZE_BILINEAR" in dict(ReadFile(path.read_bytes()).operators()):
            raise ValueError("bilinear kernels keep 10 or 11 bits of a position, which is no near-tie")
        found = {each: compare_litert_layers(path, model, x, engine=each) for each in ("xnnpack", "reference")}
        for engine, layers in found.items():
            # TensorFlow Lite's own kernels, to which XNNPACK leaves products of activations, round sums twice.
            left = [layer for layer in layers if layer.largest > 1 or layer not in found["reference"]]
            wrong = _beyond_ties(left, model)
            if wrong is not None:
                return f"{engine}: {wrong}"
    return None


def _beyond_ties(layers: list[LayerDifference], model: nn.Module) -> str | None:
    scales = {name: each.grid()[0] for name, each in model.named_modules() if isinstance(each, qat.Quantizer)}
    beyond = [layer for layer in layers if layer.beyond_ties]
    return next((str(each) for each in beyond if float(scales.get(each.name, torch.ones(())).min()) > ROUNDING), None)
