"""The names of a file's quantizers and weights: those of the model."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from qat.export.integers.evaluation import numbered
from qat.export.onnx.operators import LAYER, QUANTIZER


def name_quantizers(proto: Any, expected: Mapping[str, tuple[float, ...]]) -> None:
    """Give every QuantizeLinear and its integers the name of its quantizer; further calls are numbered.

    Two quantizers with the same grid on the same tensor become one operator, with the name of one of them.

    Args:
        proto: the file.
        expected: the grids of the model's quantizers, by name.

    Raises:
        ValueError: if a quantizer is missing.
    """
    readers: dict[str, list[Any]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    seen: Counter[str] = Counter()
    for node in proto.graph.node:
        name = _metadata(node, QUANTIZER)
        if name is None:
            continue
        following = readers.get(node.output[0], [])
        # The last integer tensor of a quantizer: QuantizeLinear, or the Clip behind it.
        last = following[0] if following and following[0].op_type == "Clip" else node
        new = numbered(name, seen)
        for reader in readers.get(last.output[0], []):
            reader.input[:] = [new if old == last.output[0] else old for old in reader.input]
        last.output[0] = new
        node.name = new
    present = {expected[name] for name in seen}
    missing = sorted(name for name, grid in expected.items() if name not in seen and grid not in present)
    if missing:
        raise ValueError(
            f"export_onnx: {len(missing)} of the model's {len(expected)} quantizers are not in the ONNX graph:"
            f" {', '.join(missing[:5])}"
        )


def name_weights(proto: Any) -> None:
    """Call the DequantizeLinear of every layer's weight `<layer>.weight`; further calls of a layer are numbered."""
    seen: Counter[str] = Counter()
    for node in proto.graph.node:
        layer = _metadata(node, LAYER)
        if layer is not None:
            node.name = numbered(f"{layer}.weight", seen)


def strip_traces(proto: Any) -> None:
    """Drop the exporter's Python stack traces: they name this machine's paths and are larger than the operators."""
    _strip_graph(proto.graph)


def _strip_graph(graph: Any) -> None:
    """A graph's traces, and those of the graphs inside it: the bodies of loops."""
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _strip_graph(inner)


def _metadata(node: Any, key: str) -> str | None:
    return next((entry.value for entry in node.metadata_props if entry.key == key), None)
