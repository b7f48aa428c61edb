"""`lint_onnx` and its rules: how severe a fact is for each runtime, and sources."""

import os
from dataclasses import dataclass
from pathlib import Path

from qat.export.lint.checks import LAYERS, ONE_GRID, QuantizedGraph, facts
from qat.export.onnx.saturation import saturation_of
from qat.targets import profile_of

PROFILES = {"onnxruntime": "onnxruntime", "tensorrt": "tensorrt", "openvino": "openvino", "xnnpack": "qnnpack"}
"""The runtimes, and the target profile of each."""

TRT, ORT, OV, CPU = "tensorrt", "onnxruntime", "openvino", "onnxruntime xnnpack"
REST, ALL = f"{CPU} {OV}", f"{CPU} {OV} {TRT}"

_PARSER = "https://github.com/onnx/onnx-tensorrt/blob/main/onnxOpImporters.cpp (QuantDequantLinearHelper)"
_TRT_OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md"
_NVIDIA = "https://docs.nvidia.com/deeplearning/tensorrt"
_TRT = f"{_NVIDIA}/latest/inference-library/quantized-types-explicit-quantization.html"
_ORT = "https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core"
_QDQ = f"{_ORT}/optimizer/qdq_transformer"
_SELECTORS = f"{_QDQ}/selectors_actions/qdq_selectors.cc"
_MEASURED = "measured: ONNX Runtime 1.31.1 and OpenVINO 2026.4 on x86 (tests/export/formats/test_lint.py)"
_TARGETS = "docs/targets.md"
_SYMMETRIC = "target='tensorrt'; quantize_static(types QInt8, extra_options={'ActivationSymmetric': True})"


@dataclass(frozen=True)
class Rule:
    """One sentence on a fact, and the page, source or measurement that backs it.

    It names the runtimes that do not load the file, do not run it or compute something else (`error`), those that
    compute in float or slower than they could (`warning`), and those where that may be wanted (`note`).
    """

    name: str
    says: str
    source: str
    error: str = ""
    warning: str = ""
    note: str = ""
    remedy: str = ""

    def severity(self, runtime: str) -> str:
        """Return the severity for a runtime; "" if the rule does not concern it."""
        return next((each for each in ("error", "warning", "note") if runtime in getattr(self, each).split()), "")


RULES = (
    Rule("unquantized", "the file has no quantizers", "https://onnx.ai/onnx/operators/", warning=ALL),
    Rule("unsigned", "uint8 is read as int8: codes above 127 are lost", _PARSER, error=TRT, remedy=_SYMMETRIC),
    Rule("zero-point", "a zero point has to be 0", _PARSER, error=TRT, remedy=_SYMMETRIC),
    Rule("weight-zero-point", "the zero point of a weight has to be 0, or its layer computes in float", _MEASURED,
         error=TRT, warning=f"{OV} xnnpack", remedy="quantize_static(extra_options={'WeightSymmetric': True})"),
    Rule("int32-bias", "DequantizeLinear takes no int32", _TRT_OPERATORS, error=TRT,
         remedy="target='tensorrt'; quantize_static(extra_options={'QuantizeBias': False})"),
    Rule("bias-grid", "a quantized bias that is not int32 makes its layer compute in float", _SELECTORS,
         warning=f"{CPU} {TRT}", remedy="a float bias"),
    Rule("bias-scale", "the scale of a bias is not the input's times the weight's: other answers, or float", _MEASURED,
         error=ORT),
    Rule("unsigned-weight", "a uint8 weight with zero point 0 is not compiled", _MEASURED, error=OV),
    Rule("scale", "a scale has to be positive", _PARSER, error=TRT, warning=REST),
    Rule("computed-grid", "scale and zero point have to be constants", _TRT, error=TRT, warning=f"{OV} xnnpack"),
    Rule("16-bits", "integers of 16 bits have no kernels", _SELECTORS, error=TRT, warning=REST),
    Rule("4-bits", "DequantizeLinear reads 4 bits: its layer computes in float", _SELECTORS, warning=ALL,
         remedy="a Cast to int8 before it, as export_onnx writes"),
    Rule("cast-4-bits", "integers of 4 bits are not cast", _PARSER, error=TRT, remedy="export_onnx(packed=False)"),
    Rule("float8", "FP8 has no kernels: a layer computes in float, and ONNX Runtime up to 1.31 refuses it", _MEASURED,
         warning=f"{ORT} {OV} xnnpack"),
    Rule("operator-format", "Q/DQ pairs are read, no integer operators", _TRT_OPERATORS, error=TRT,
         remedy="quantize_static(quant_format=QuantFormat.QDQ)"),
    Rule("integer-operator", "DequantizeLinear alone may read what QuantizeLinear makes", _TRT, error=TRT),
    Rule("channel-activation", "an activation has to have one scale", _MEASURED, error=f"{ORT} {TRT}",
         warning=f"{OV} xnnpack"),
    Rule("weight-axis", "scales have to lie along the output channels: other answers, or float", _MEASURED, error=ORT,
         warning=f"{OV} xnnpack {TRT}"),
    Rule("double", "two quantizers in a row on two grids, of which ONNX Runtime makes a third one",
         f"{_ORT}/optimizer/double_qdq_pairs_remover.cc", warning=ALL, remedy="quantize the tensor once"),
    Rule("other-grid", "values are moved or pooled from one grid to another, in float", _SELECTORS,
         warning=f"{CPU} {TRT}", remedy="one grid on both sides"),
    Rule("split-block", "a quantizer stands between a layer and its BatchNorm, ReLU or clip", _TRT,
         warning=f"{CPU} {TRT}", remedy="one quantizer, behind all of them"),
    Rule("residual", "the sum is in float: the branch beside the convolution is not quantized", _TRT, warning=TRT,
         remedy="a quantizer on that branch, in front of the sum"),
    Rule("quantized-sum", "a quantizer between convolution and sum makes them two kernels",
         f"{_NVIDIA}/tensorflow-quantization-toolkit/docs/docs/add_custom_qdq_cases.html", note=TRT),
    Rule("concat", "a layer reads a concatenation of unequal grids", _MEASURED, warning=f"{OV} {TRT}",
         remedy="a quantizer behind the concatenation, or one grid for all of it"),
    Rule("float-operand", "computed in float: not all operands are quantized", _SELECTORS, warning=ALL),
    Rule("rounded-weight", "a float weight behind quantized values: ONNX Runtime rounds it to int8, with one scale",
         f"{_QDQ}/weight_bias_quantization.cc", warning=ALL, remedy="quantize the weight, or not its input"),
    Rule("result", "computed in float: not one quantizer alone reads the result", _SELECTORS, warning=CPU),
    Rule("float-result", "computed in float: no quantizer reads the result", _SELECTORS, note=CPU),
    Rule("clip-kept", "computed in float: the quantizer's range does not end where the clip in front of it does",
         f"{_QDQ}/qdq_util.cc", warning=CPU, remedy="behind a ReLU a zero point that is the lowest integer"),
    Rule("shared-int8", "computed in float on x86: int8 that several operators read stays int8",
         f"{_QDQ}/qdq_s8_to_u8.cc", warning=ORT, remedy="uint8 activations"),
    Rule("float-bias", "computed in float: a float bias, and no quantizer behind it", _MEASURED, note=ORT),
    Rule("transposed", "computed in float: a transposed convolution", _MEASURED, note=f"{ORT} {OV}"),
    Rule("xnnpack-types", "left to the CPU provider: it takes convolutions of int8 by int8, or uint8 by uint8",
         f"{_ORT}/providers/xnnpack/nn/conv_base.cc", warning="xnnpack",
         remedy="int8 activations (QInt8; activation: {signed: true, symmetric: true})"),
    Rule("float-operation", "computed in float between two grids", _TARGETS, note=ALL),
    Rule("saturation", "sums of products may saturate on x86 without VNNI", _TARGETS, note=f"{ORT} {OV}"),
)  # fmt: skip

MOVED_BY_ONNX_RUNTIME = ("Identity", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "MaxPool")
"""Operators that qdq_propagation.cc moves quantizers across, or that another optimisation removes."""


@dataclass(frozen=True)
class Finding:
    """An operator that breaks a rule, by its name, or its type and result.

    `detail` is what is seen there, if the rule does not say it.
    """

    rule: Rule
    severity: str
    operator: str
    detail: str


def lint_onnx(path: str | os.PathLike[str], runtime: str) -> list[Finding]:
    """Find what a runtime would refuse in a quantized ONNX file, or compute in float.

    Nothing is run. The graphs inside operators (the branches of If, the body of Loop) are not looked into.

    Args:
        path: the file.
        runtime: "onnxruntime", "tensorrt", "openvino", or "xnnpack", which is ONNX Runtime's provider of that name.

    Raises:
        ValueError: for another runtime, or a file that is not ONNX.
    """
    import onnx
    from onnx.inliner import inline_local_functions

    if runtime not in PROFILES:
        raise ValueError(f"lint_onnx: runtime must be one of {', '.join(PROFILES)}, got {runtime!r}")
    content = Path(path).read_bytes()
    try:
        proto = onnx.load_from_string(content)
        onnx.load_external_data_for_model(proto, str(Path(path).parent))
    except Exception as error:  # protobuf's, onnx's, that of a missing file of weights
        raise ValueError(f"lint_onnx: {str(path)!r} is not read as ONNX: {error}") from None
    graph = inline_local_functions(proto).graph if proto.functions else proto.graph
    if not graph.node:
        raise ValueError(f"lint_onnx: {str(path)!r} is not an ONNX file, or one without operators")
    quantized = QuantizedGraph(graph, MOVED_BY_ONNX_RUNTIME if runtime in CPU.split() else (*ONE_GRID, "Concat"))
    seen = [(name, node.name or f"{node.op_type} -> {node.output[0]}", detail)
            for name, node, detail in facts(quantized, profile_of(PROFILES[runtime]).float_operations)]  # fmt: skip
    seen += [("saturation", each.layer, "") for each in saturation_of(graph) if each.channels]
    if not any("QuantizeLinear" in node.op_type for node in graph.node):
        seen = [("unquantized", node.name or node.output[0], "") for node in graph.node if node.op_type in LAYERS]
    rules = {rule.name: rule for rule in RULES}
    found = [Finding(rules[name], rules[name].severity(runtime), operator, detail) for name, operator, detail in seen]
    return [each for each in found if each.severity]
