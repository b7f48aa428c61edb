"""What runs how in a fused graph, and why: the answers of the predicates that decided it, by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from qat.fused.functions.codes import NOT_TAKEN, SHIFT, learned_by
from qat.fused.functions.products import integers_refusal, weight_refusal
from qat.fused.plan import CodesPlan
from qat.kernels.dispatch import by_formula
from qat.layers import QuantLayer
from qat.preparation.explanation import PLAINLY, Trains
from qat.quantizer import Quantizer
from qat.tracing.nodes import submodule_of

ON_CODES = "on codes"
BY_FORMULA = "on codes, by formula"


def rows_of(plan: CodesPlan, whole: str | None, shapes: Mapping[str, torch.Size]) -> dict[str, Trains]:
    """How layers, quantizers of activations and their products train, by name.

    Args:
        plan: of the graph.
        whole: why none of it runs on codes; None if it may.
        shapes: what layers are given, by name; those that are missing may be given anything.
    """
    found: dict[str, Trains] = {}
    for node in plan.nodes:
        module = submodule_of(plan.model, node)
        if not (isinstance(module, (Quantizer, QuantLayer)) or node in plan.matmuls or node in plan.refused):
            continue
        kind = "matmul" if module is None else type(module).__name__
        name = node.name if module is None else str(node.target)
        row = Trains(kind, *_way(plan, node, module, shapes.get(name)))
        if whole is not None:
            row = Trains(kind, PLAINLY, row.why if row.how == PLAINLY else whole)
        if name not in found or row.how == PLAINLY:  # a layer that is called twice is as slow as its slowest call
            found[name] = row
    return found


def _way(plan: CodesPlan, node: fx.Node, module: Any, shape: torch.Size | None) -> tuple[str, str]:
    """How a node trains, and why."""
    reason = plan.refused.get(node) or _tensors_refusal(plan, node, module)
    if reason is not None:
        return PLAINLY, reason
    if by_formula(next(plan.model.parameters())):
        return BY_FORMULA, ""
    if isinstance(module, QuantLayer):
        return _product(plan, node, module, shape)
    return ON_CODES, _one_pass(plan, node)


def _one_pass(plan: CodesPlan, quantizer: fx.Node) -> str:
    """What is computed together with a quantizer, from the BatchNorm on; nothing of a product of activations."""
    chain = plan.chains.get(quantizer)
    if chain is None:
        return ""
    first: Any = chain.source if chain.operands is not None else None
    if chain.layer is not None and chain.layer in plan.followed:
        first = chain.layer.kwargs["norm"]
    nodes = (first, *(chain.activation.nodes[::-1] if chain.activation is not None else ()))
    names = [str(node.target) if node.op in ("call_module", "get_attr") else node.name for node in nodes if node]
    return f"in one pass with {', '.join(names)}" if names else ""


def _tensors_refusal(plan: CodesPlan, node: fx.Node, module: Any) -> str | None:
    """What the functions on codes would find of the tensors of a quantizer or a layer."""
    if isinstance(module, Quantizer):
        return NOT_TAKEN if learned_by(module, module.scale) is None else None
    if not isinstance(module, QuantLayer):
        return None
    weight = _weight(plan, node, module)
    reason = None if weight is None else weight_refusal(weight)
    if reason is None and learned_by(module.weight_quantizer, module.weight_quantizer.scale, None) is None:
        return f"its weight_quantizer: {NOT_TAKEN}"
    return reason


def _product(plan: CodesPlan, node: fx.Node, layer: QuantLayer, shape: torch.Size | None) -> tuple[str, str]:
    """How a layer on codes multiplies."""
    weight, source = _weight(plan, node, layer), plan.grid(node.args[0])
    assert source is not None
    quantizer: Any = submodule_of(plan.model, source)
    zero = SHIFT if quantizer.spec.signed else 0
    zero += 0 if quantizer.zero_point is None else round(float(quantizer.zero_point))
    if weight is None:
        return f"{ON_CODES}, in integers where it pays", ""
    reason = integers_refusal(layer, shape, weight.shape, zero)
    if reason is not None:
        return f"{ON_CODES}, in float", reason
    return f"{ON_CODES}, in integers" + ("" if shape is not None else " where it pays"), ""


def _weight(plan: CodesPlan, node: fx.Node, layer: QuantLayer) -> Tensor | None:
    """A layer's weight; None if the graph computes it."""
    own = getattr(layer, "weight", None)
    if isinstance(own, Tensor):
        return own
    given: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, fx.Node) or given.op != "get_attr":
        return None
    owner, _, name = str(given.target).rpartition(".")
    found = getattr(plan.model.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None
