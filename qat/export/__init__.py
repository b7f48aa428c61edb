"""Deployment: integer ONNX files, and the proof that a file computes what its trained model does."""

from qat.export.agreement import Verification
from qat.export.exporter import export_onnx
from qat.export.integers.following import LayerDifference
from qat.export.integers.weights import IntegerArrays, integer_weights
from qat.export.onnx.saturation import Saturation, find_saturation
from qat.export.onnxruntime.ties import Differences, explain_differences
from qat.export.onnxruntime.verification import compare_layers, optimized_operators, verify_onnx

__all__ = [
    "Differences",
    "IntegerArrays",
    "LayerDifference",
    "Saturation",
    "Verification",
    "compare_layers",
    "explain_differences",
    "export_onnx",
    "find_saturation",
    "integer_weights",
    "optimized_operators",
    "verify_onnx",
]
