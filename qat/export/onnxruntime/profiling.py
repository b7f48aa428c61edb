"""Milliseconds of each layer in ONNX Runtime."""

import json
import os
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from qat.export.onnx.graph import readers
from qat.export.onnxruntime.passes import MOVING
from qat.export.onnxruntime.session import open_session, run_session

TIME = "_kernel_time"
"""The end of the events' names that measure an operator."""

NUMBERED = re.compile(r"_token_\d+$")


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
        ValueError: if the file has no layers with weights on a grid, or ONNX Runtime's graph lost one.
    """
    import onnx

    file = Path(path)
    products = _products(onnx.load(file, load_external_data=False).graph)
    if not products:
        raise ValueError(f"layer_milliseconds: {file.name} has no weights on a grid")
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        session = open_session(file, optimized=optimized, threads=1, profile=Path(folder) / "profile")
        for _ in range(1 + rounds):
            run_session(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text())
        nodes = {node.name: node for node in onnx.load(optimized, load_external_data=False).graph.node}
    times = dict[str, list[float]]()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(TIME):
            times.setdefault(event["name"].removesuffix(TIME), []).append(event["dur"] / 1000)
    owners = _owners([nodes[name] for name in times], products)
    found = dict.fromkeys(products.values(), 0.0)
    if lost := next((layer for layer in found if layer not in owners.values()), None):
        raise ValueError(f"layer_milliseconds: {file.name}: ONNX Runtime runs no product with the weight of {lost}")
    for name, measured in times.items():
        found[owners[name]] += median(measured[1:])
    return found


def _products(graph: Any) -> dict[str, str]:
    """The names of the operators that read a weight on a grid, and the layers."""
    read_by, found = readers(graph), dict[str, str]()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.name.endswith(".weight"):
            reading = [node]
            while reading:
                for each in read_by.get(reading.pop().output[0], []):
                    if each.op_type in MOVING:
                        reading.append(each)
                    else:
                        found[each.name] = node.name.removesuffix(".weight")
    return found


def _owners(nodes: list[Any], products: dict[str, str]) -> dict[str, str]:
    """The layer that each operator counts to, of operators in the order in which they ran: a file's is another.

    What ONNX Runtime makes of an operator keeps its name, with a number behind it.
    """
    order = [layer for node in nodes if (layer := products.get(NUMBERED.sub("", node.name)))]
    place, last, found = len(order), len(order) - 1, dict[str, int]()
    first = dict[str, int]()  # of each tensor: the first product that is made from it
    for node in reversed(nodes):
        is_product = NUMBERED.sub("", node.name) in products
        place -= is_product
        found[node.name] = place if is_product else min(first.get(name, last) for name in node.output)
        for name in node.input:
            first[name] = min(found[node.name], first.get(name, last))
    return {name: order[number] for name, number in found.items()}
