"""Deployment: integer files in ONNX and .tflite, and proofs of their answers."""

from qat.export.agreement import Verification
from qat.export.converted import IntegerArrays, IntegerModel, convert, integer_weights
from qat.export.exporter import export_onnx
from qat.export.lint.rules import Finding, lint_onnx
from qat.export.litert.engines import compare_litert_layers, verify_litert
from qat.export.litert.exporter import export_litert
from qat.export.onnx.saturation import Saturation, find_saturation
from qat.export.onnxruntime.verification import compare_layers, optimized_operators, verify_onnx
from qat.export.steps import IntegerStep, integer_program
from qat.export.ties import Differences, explain_differences
from qat.integers.following import LayerDifference
from qat.integers.frozen import IntegerGrid

__all__ = [
    "Differences",
    "Finding",
    "IntegerArrays",
    "IntegerGrid",
    "IntegerModel",
    "IntegerStep",
    "LayerDifference",
    "Saturation",
    "Verification",
    "compare_layers",
    "compare_litert_layers",
    "convert",
    "explain_differences",
    "export_litert",
    "export_onnx",
    "find_saturation",
    "integer_program",
    "integer_weights",
    "lint_onnx",
    "optimized_operators",
    "verify_litert",
    "verify_onnx",
]
