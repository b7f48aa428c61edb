"""Quantization-aware training for PyTorch on straight-through estimators: what is trained is what is deployed.

    float_model = torchvision.models.resnet18(weights="DEFAULT")
    model = qat.prepare(float_model)
    qat.calibrate(model, batches)
    ...train as always...
    qat.export_onnx(model, "model.onnx", images)

`import qat` loads torch and nothing heavy; onnx and onnxruntime are loaded by the functions that need them.
"""

from qat import functional, testing
from qat.analysis import summary
from qat.calibration import calibrate
from qat.ewgs import update_ewgs
from qat.export import export_onnx, verify_onnx
from qat.layers import QuantConv2d, QuantLinear
from qat.preparation import prepare
from qat.quantizer import Quantizer, penalty, register_quantizer, set_progress
from qat.spec import QuantRecipe, QuantSpec

__version__ = "0.1.0"

__all__ = [
    "QuantConv2d",
    "QuantLinear",
    "QuantRecipe",
    "QuantSpec",
    "Quantizer",
    "calibrate",
    "export_onnx",
    "functional",
    "penalty",
    "prepare",
    "register_quantizer",
    "set_progress",
    "summary",
    "testing",
    "update_ewgs",
    "verify_onnx",
]
