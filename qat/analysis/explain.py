"""`explain`: how every layer of a prepared model trains, and why not faster."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qat.analysis.table import layers_in_order
from qat.contexts import evaluating, first_calls
from qat.inputs import Arguments, Inputs, bind_inputs, call_with, expect_model
from qat.layers import QuantLayer
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.proof import traced_parts
from qat.text import table as text_table

HEADER = ("name", "kind", "trains", "why")

PLAINLY = "operation by operation"

Row = tuple[str, str, str]
"""Class of a layer or quantizer (or "matmul"), how it trains, and the reason why not faster, or ""."""


def explain(model: nn.Module, example_inputs: Inputs | None = None) -> str:
    """Tell how each layer, quantizer and product of a prepared model trains, and why.

    Training on codes is the fast way: layers pass integers to each other, and multiply integers where that is exact
    and pays, else floating numbers on the same grids. Whatever cannot do that trains operation by operation, and the
    last column has the reason of the code that decided it.

    Args:
        model: from `prepare`; it is left as it was.
        example_inputs: as of `prepare`: a batch, for which it is said where integers pay. Without it, they may pay
            for another batch than the one in mind.

    Returns:
        A sentence for the model, or one for each of its traced parts, and a table of their layers.

    >>> from qat import prepare
    >>> print(explain(prepare(nn.Sequential(nn.Linear(8, 2)), example_inputs=torch.randn(4, 8))))
    the model trains operation by operation: it is not calibrated
    <BLANKLINE>
    name             kind          trains                  why
    input_quantizer  LSQQuantizer  operation by operation  it is not calibrated
    0                QuantLinear   operation by operation  its operand comes from input_quantizer: it is not calibrated
    """
    expect_model(explain, model)
    calls, shapes = _seen(model, example_inputs)
    sentences: list[str] = []
    rows: dict[str, Row] = {}
    parts = traced_parts(model)
    for name, part in parts.items():
        start = f"{name}." if name else ""
        inner = {path.removeprefix(start): shape for path, shape in shapes.items() if path.startswith(start)}
        how, found = f"trains {PLAINLY}: this copy of qat has no qat.codes", {}
        if (engine := part._fused_engine()) is not None:
            how, found = engine._explain(calls.get(part), inner)
        sentences.append(f"{name or 'the model'} {how}")
        rows |= {f"{start}{path}": row for path, row in found.items()}
    for name, module in layers_in_order(model):
        rows.setdefault(name, (type(module).__name__, PLAINLY, _elsewhere(name, parts)))
    if not parts:
        sentences.append(f"the model trains {PLAINLY}: it has no traced graph")
    table = [HEADER, *((name, *row) for name, row in rows.items())]
    return "\n".join([*sentences, "", *text_table(table)])


def _elsewhere(name: str, parts: Mapping[str, PreparedGraph]) -> str:
    # The reason why no graph of the parts explains a layer.
    part = max((path for path in parts if not path or name.startswith(f"{path}.")), key=len, default=None)
    if part is None:
        return "it stands outside of every traced graph"
    if parts[part]._fused_engine() is None:
        return ""  # the sentence above the table says why
    called = {str(node.target) for node in parts[part].graph.nodes if node.op == "call_module"}
    start = f"{part}." if part else ""
    for path in called:
        if name.startswith(f"{start}{path}."):
            return f"it runs inside of {start}{path}, which is one step of the graph"
    return "no graph calls it"


def _seen(model: nn.Module, example_inputs: Inputs | None) -> tuple[dict[nn.Module, Arguments], dict[str, torch.Size]]:
    # The arguments that a run with example inputs gives to traced parts, and the shapes that it gives to layers.
    if example_inputs is None:
        return {}, {}
    watched = [module for module in model.modules() if isinstance(module, (PreparedGraph, QuantLayer))]
    with evaluating(model), torch.no_grad(), first_calls(watched) as calls:
        call_with(model, bind_inputs("explain", model, example_inputs))
    layers = {name: calls[layer][0] for name, layer in model.named_modules() if layer in calls}
    return calls, {name: args[0].shape for name, args in layers.items() if args and isinstance(args[0], Tensor)}
