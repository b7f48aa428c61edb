"""Milliseconds of each layer in ONNX Runtime."""

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from qat.export.onnxruntime.session import open_session, run_session

TIME = "_kernel_time"
"""The end of the events' names that measure an operator."""


def layer_milliseconds(path: str | os.PathLike[str], inputs: Tensor, rounds: int = 30) -> dict[str, float]:
    """The time of each layer in an exact session of one thread, the median over rounds.

    ONNX Runtime's profile measures operators. A product is its layer's; any other operator, such as an activation or
    the quantizer of an input, counts to the first layer that reads what comes out of it, and after the last layer to
    that one. So the layers add up to the model.

    Args:
        path: the exported file.
        inputs: one batch.
        rounds: calls that are measured, after one that is not.

    Raises:
        ValueError: if the file has no layers with weights on a grid.
    """
    import onnx

    layers = _layers_of_weights(onnx.load(path, load_external_data=False).graph)
    if not layers:
        raise ValueError(f"layer_milliseconds: {Path(path).name} has no weights on a grid")
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        session = open_session(path, optimized=optimized, threads=1, profile=Path(folder) / "profile")
        for _ in range(1 + rounds):
            run_session(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text())
        nodes = {node.name: node for node in onnx.load(optimized, load_external_data=False).graph.node}
    times = dict[str, list[float]]()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(TIME):
            times.setdefault(event["name"].removesuffix(TIME), []).append(event["dur"] / 1000)
    owners = _owners([nodes[name] for name in times], layers)
    found = dict.fromkeys(layers.values(), 0.0)
    for name, measured in times.items():
        found[owners[name]] += median(measured[1:])
    return found


def _layers_of_weights(graph: Any) -> dict[str, str]:
    """The layer of each tensor that holds a weight's integers or its values."""
    return {
        tensor: node.name.removesuffix(".weight")
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.name.endswith(".weight")
        for tensor in (node.input[0], node.output[0])
    }


def _owners(nodes: list[Any], layers: dict[str, str]) -> dict[str, str]:
    """The layer that each operator counts to, of operators in the order in which they ran: a file's is another."""
    products = [layers[name] for node in nodes for name in node.input if name in layers]
    place, found = len(products), dict[str, int]()
    first = dict[str, int]()  # of each tensor: the first product that is made from it
    for node in reversed(nodes):
        weights = sum(name in layers for name in node.input)
        place -= weights
        found[node.name] = place if weights else min(first.get(name, len(products) - 1) for name in node.output)
        for name in node.input:
            first[name] = min(found[node.name], first.get(name, len(products) - 1))
    return {name: products[number] for name, number in found.items()}
