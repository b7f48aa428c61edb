"""Why a layer's integers differ between a file and its model: what is tried, from the likely to the rare."""

from typing import Any

import numpy as np
from torch import Tensor

from qat.cli.runs import Run
from qat.export import LayerDifference, compare_layers, find_saturation, integer_weights
from qat.export.onnx.containers import stored_arrays
from qat.export.onnxruntime.default_session import default_is_exact


def probable_cause(opened: Run, layer: LayerDifference, images: Tensor, *, default_session: bool) -> str:
    """A sentence on what is behind a layer's differences.

    Args:
        opened: the run of the file.
        layer: the first one that differs.
        images: the batch on which it differs.
        default_session: whether products were as in a session without options.
    """
    other = _other_weights(opened)
    if other:
        return other
    if not layer.beyond_ties:
        return (
            "near-ties: float32 sums in another order round a value that lies between two integers to the other one;"
            " any two runtimes do that"
        )
    if default_session and not default_is_exact():
        layers = sum(bool(each.channels) for each in find_saturation(opened.onnx))
        return (
            f"this processor adds pairs of products in 16 bits (no VNNI), where {layers} layers may saturate; compare"
            " without --default-session, and see docs/targets.md for exact sessions and models"
        )
    plain = {each.name: each for each in compare_layers(opened.onnx, opened.quantized, images, optimize=False)}
    if not plain[layer.name].beyond_ties:
        return (
            "an optimisation of ONNX Runtime: without its graph optimisation this layer is equal; export the file"
            " again, since earlier versions of qat did not keep it from all that it changes (layers left in float)"
        )
    return "the file computes this layer otherwise; a rule or operation of your own? If not, please report it"


def _other_weights(opened: Run) -> str:
    """That the file was exported from other weights than the checkpoint has; "" if it was not."""
    import onnx

    graph = onnx.load(opened.onnx).graph
    stored = stored_arrays(graph)
    held = {node.name: stored.get(node.input[0]) for node in graph.node if node.op_type == "DequantizeLinear"}
    for layer, arrays in integer_weights(opened.quantized).items():
        weight = held.get(f"{layer}.weight")
        if weight is not None and not _is_same(weight, arrays.weight):
            return (
                f"the file is of other weights than the checkpoint, from {layer!r} on: it was written before or after"
                " them; the command of the run with resume=auto exports again"
            )
    return ""


def _is_same(stored: "np.ndarray[Any, Any]", weight: "np.ndarray[Any, Any]") -> bool:
    """Whether a file holds a weight, in one of the layouts that it may have there."""
    layouts = (weight, weight.swapaxes(0, 1)) if weight.ndim > 1 else (weight,)
    return any(np.array_equal(stored, each) for each in layouts)
