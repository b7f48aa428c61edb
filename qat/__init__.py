"""Quantization-aware training for PyTorch on straight-through estimators.

The integers that are trained are the integers that are deployed.

    float_model = torchvision.models.resnet18(weights="DEFAULT")
    model = qat.prepare(float_model, example_inputs=images)
    qat.calibrate(model, batches)
    ...train as always...
    qat.export_onnx(model, "model.onnx", images)

`import qat` loads torch and nothing heavy; onnx and onnxruntime are loaded by the functions that need them.
"""

from qat import functional, testing
from qat.analysis import explain, summary
from qat.analysis.cost import cost
from qat.analysis.errors import layer_errors
from qat.analysis.features import feature_extractor
from qat.analysis.sensitivity import sensitivity
from qat.analysis.state import float_state_dict
from qat.analysis.statistics import quantizer_statistics
from qat.batch_norm import freeze_batch_norm, reestimate_batch_norm, sync_batch_norm
from qat.calibration import calibrate
from qat.export import (
    convert,
    export_litert,
    export_onnx,
    integer_program,
    integer_weights,
    verify_litert,
    verify_onnx,
)
from qat.finetuning.ewgs import update_ewgs
from qat.layers import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantEmbedding,
    QuantGRU,
    QuantLinear,
    QuantLSTM,
    QuantMultiheadAttention,
)
from qat.loading import load
from qat.preparation.proof import self_check
from qat.quantizer import (
    Quantizer,
    parameter_groups,
    penalty,
    register_quantizer,
    replicate_quantizers,
    set_progress,
)
from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.switches import disable_fake_quant, enable_fake_quant, freeze_scales
from qat.workflow import prepare

__version__ = "0.1.0"

__all__ = [
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantGRU",
    "QuantLSTM",
    "QuantLinear",
    "QuantMultiheadAttention",
    "QuantRecipe",
    "QuantSpec",
    "Quantizer",
    "calibrate",
    "convert",
    "cost",
    "disable_fake_quant",
    "enable_fake_quant",
    "explain",
    "export_litert",
    "export_onnx",
    "feature_extractor",
    "float_state_dict",
    "freeze_batch_norm",
    "freeze_scales",
    "functional",
    "integer_program",
    "integer_weights",
    "layer_errors",
    "load",
    "parameter_groups",
    "penalty",
    "prepare",
    "quantizer_statistics",
    "reestimate_batch_norm",
    "register_quantizer",
    "replicate_quantizers",
    "self_check",
    "sensitivity",
    "set_progress",
    "summary",
    "sync_batch_norm",
    "testing",
    "update_ewgs",
    "verify_litert",
    "verify_onnx",
]
