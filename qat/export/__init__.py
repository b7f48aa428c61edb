"""Deployment: integer ONNX files, and the proof that they answer as the trained model does."""

from qat.export.agreement import Verification
from qat.export.exporter import export_onnx
from qat.export.integers.saturation import Saturation, find_saturation
from qat.export.onnxruntime.verification import LayerDifference, compare_layers, optimized_operators, verify_onnx

__all__ = [
    "LayerDifference",
    "Saturation",
    "Verification",
    "compare_layers",
    "export_onnx",
    "find_saturation",
    "optimized_operators",
    "verify_onnx",
]
