"""Compares evaluation with ONNX Runtime layer by layer; each layer gets the integers that the runtime computed."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qat
from qat.export.onnxruntime.verification import LayerComparison

RARELY = 0.01
"""The share of a quantizer's integers, beyond two, that may lie on ties and be rounded to the neighbouring level."""


def against_runtime(model: Any, x: Tensor) -> str | None:
    """What differs, or None; model: a prepared one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        qat.export_onnx(model, path, x)
        comparison = LayerComparison(path, model)
        layers, outputs = comparison.follow(x)
        fused = comparison.fused(x, [theirs for _, theirs in outputs])
    for layer in [*layers, *fused]:
        if layer.largest > 1 or layer.differing > 2 + RARELY * layer.elements:
            return str(layer)
    for ours, theirs in outputs:
        gap = (ours - theirs).norm() / ours.norm().clamp(min=1e-3)
        if not gap <= 1e-4 and not torch.equal(ours, theirs):
            return f"output differs by {float(gap):.1e}"
    return None
