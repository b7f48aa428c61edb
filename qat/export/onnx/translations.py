"""What torch.onnx translates into another function: written rightly here, or refused by name."""

import math
from typing import Any

import torch

UPSAMPLING = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
"""Interpolations with antialias=True."""


def own_translations() -> dict[Any, Any]:
    """Operators that are written otherwise: torch.onnx's atan2(0, x) is -pi for x < 0."""
    from onnxscript import opset18 as op

    def atan2(y: Any, x: Any) -> Any:
        zero, angle = op.CastLike(0.0, y), op.CastLike(math.pi, y)
        turned = op.Where(op.Less(x, zero), op.Where(op.Less(y, zero), op.Neg(angle), angle), zero)
        return op.Add(op.Where(op.Equal(y, zero), zero, op.Atan(op.Div(y, x))), turned)

    return {torch.ops.aten.atan2.default: atan2}


def refuse_lost_options(exported: Any) -> None:
    """Refuse an exported program of torch's with an option that torch.onnx drops or a runtime takes otherwise."""
    for node in exported.graph.nodes:
        names = [each.name for each in node.target._schema.arguments] if hasattr(node.target, "_schema") else []
        given, lost = {**dict(zip(names, node.args, strict=False)), **node.kwargs}, ""
        stretched = given.get("align_corners") or any(given.get(key) for key in ("scale_factors", "scales_h", "scales_w"))
        if given.get("divisor_override"):
            lost = f"divisor_override={given['divisor_override']}; multiply the average by a number instead"
        elif names and node.target._schema.name.rpartition("::")[2] in UPSAMPLING and stretched:
            lost = "align_corners or scale_factor beside antialias=True; give size, or recompute_scale_factor=True"
        if lost:
            stack = list(node.meta.get("nn_module_stack", {}).values())
            where = (stack[-1][0] if stack else "") or node.name
            raise ValueError(f"export_onnx: {where}: torch.onnx writes another function for {lost}")
