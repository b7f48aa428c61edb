"""`lint_onnx`: the rules of one runtime over what is seen in one file."""

import os
from dataclasses import dataclass
from pathlib import Path

from qat.export.lint.checks import ONE_GRID, facts
from qat.export.lint.reading import LAYERS, QuantizedGraph
from qat.export.lint.rules import CPU, PROFILES, RULES, Rule
from qat.export.onnx.saturation import saturation_of
from qat.targets import profile_of

MOVED_BY_ONNX_RUNTIME = ("Identity", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "MaxPool")
"""Its qdq_propagation.cc moves quantizers across them, or another optimisation removes them."""


@dataclass(frozen=True)
class Finding:
    """An operator that a rule speaks of: its name, or its type and result; and what is seen there, if the rule does not
    say it."""

    rule: Rule
    severity: str
    operator: str
    detail: str


def lint_onnx(path: str | os.PathLike[str], runtime: str) -> list[Finding]:
    """What a runtime would refuse in an ONNX file with quantizers, whoever wrote it, or compute in float.

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
