"""The answer of a fused graph to `qat.explain`: what runs how, and why.

The predicates that decided it are asked again.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from qat.analysis.explain import PLAINLY, Row
from qat.codes.operators.grid import NOT_TAKEN, learned_by, shift_of
from qat.codes.operators.product import integers_refusal, weight_refusal
from qat.codes.training.plan import CodesPlan
from qat.codes.verdict import is_wanted
from qat.contexts import evaluating
from qat.graph.nodes import submodule_of
from qat.kernels import passes_values
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.torch_internals import pytree

ON_CODES = "on codes"


def explain_part(
    model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, shapes: Mapping[str, torch.Size]
) -> tuple[str, dict[str, Row]]:
    """Return a predicate for the part ('trains ...'), and a row for each module."""
    evaluated, evaluator = not model.training, model._engine_state.evaluator
    with evaluating(model) if evaluated else nullcontext():
        if evaluated:
            model.train()  # only what would train is asked about
        given = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        no_memory = "it has no memory to compute in (device meta)" if model._is_meta_only() else None
        whole = no_memory or model._watched_by() or model._refusal(given, compiling=False)
        verdict = model._derive().verdict
        distrusted = () if verdict is None else verdict.distrusted
        if distrusted is None:
            whole = whole or verdict.reason
        plan = CodesPlan(model, distrusted or ())
        if not plan.layers:
            quantizers = [each for each in model.modules() if isinstance(each, Quantizer) and each.role == "activation"]
            calibrated = not quantizers or any(each.is_calibrated for each in quantizers)
            whole = whole or ("no layer of it takes codes" if calibrated else "it is not calibrated")
        rows = _rows(plan, whole, shapes)
    if whole is not None:
        how = f"trains {PLAINLY}: {whole}"
    elif verdict is not None:
        how = str(verdict)
    elif is_wanted():
        how = "trains on codes as soon as a self-check (calibrate, self_check, a step) has shown that to be the same"
    else:
        how = "trains on codes, without a self-check (QAT_SELF_CHECK=off)"
    if evaluated:
        how = f"is in evaluation; in training it {how}"
    if evaluator is not None and evaluator.reason:
        how = f"{how}; its last evaluation ran {PLAINLY}: {evaluator.reason}"
    return how, rows


def _rows(plan: CodesPlan, whole: str | None, shapes: Mapping[str, torch.Size]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for node in plan.nodes:
        module = submodule_of(plan.model, node)
        if not (isinstance(module, (Quantizer, QuantLayer)) or node in plan.matmuls or node in plan.refused):
            continue
        kind = "matmul" if module is None else type(module).__name__
        name = node.name if module is None else str(node.target)
        how, why = _how(plan, node, module, shapes.get(name))
        if whole is not None:
            how, why = PLAINLY, why if how == PLAINLY else whole
        if name not in found or how == PLAINLY:  # a layer that is called twice is as slow as its slowest call
            found[name] = (kind, how, why)
    return found


def _how(plan: CodesPlan, node: fx.Node, module: Any, shape: torch.Size | None) -> tuple[str, str]:
    reason = plan.refused.get(node) or _tensors_refusal(plan, node, module) or _device_refusal(plan, node)
    if reason is not None:
        return PLAINLY, reason
    if isinstance(module, QuantLayer):
        return _product(plan, node, module, shape)
    return ON_CODES, _one_pass(plan, node)


def _device_refusal(plan: CodesPlan, node: fx.Node) -> str | None:
    chain = plan.chains.get(node)
    activation = None if chain is None else chain.activation
    curved = activation is not None and (activation.curve is not None or activation.axis is not None)
    if (curved or node in plan.matmuls) and passes_values(next(plan.model.parameters())):
        return "there is no kernel for it in Triton"
    return None


def _one_pass(plan: CodesPlan, quantizer: fx.Node) -> str:
    chain = plan.chains.get(quantizer)
    if chain is None:
        return ""
    first: Any = chain.source if chain.operands is not None else None
    if chain.layer is not None and chain.layer in plan.fused_norms:
        first = chain.layer.kwargs["norm"]
    nodes = (first, *(chain.activation.nodes[::-1] if chain.activation is not None else ()))
    names = [str(node.target) if node.op in ("call_module", "get_attr") else node.name for node in nodes if node]
    return f"in one pass with {', '.join(names)}" if names else ""


def _tensors_refusal(plan: CodesPlan, node: fx.Node, module: Any) -> str | None:
    if isinstance(module, Quantizer):
        return NOT_TAKEN if learned_by(module, module.scale) is None else None
    if not isinstance(module, QuantLayer):
        return None
    weight = _weight(plan, node, module)
    reason = None if weight is None or passes_values(weight) else weight_refusal(weight)
    if reason is None and learned_by(module.weight_quantizer, module.weight_quantizer.scale, None) is None:
        return f"its weight_quantizer: {NOT_TAKEN}"
    return reason


def _product(plan: CodesPlan, node: fx.Node, layer: QuantLayer, shape: torch.Size | None) -> tuple[str, str]:
    weight, source = _weight(plan, node, layer), plan.grid(node.args[0])
    assert source is not None
    quantizer: Any = submodule_of(plan.model, source)
    zero = shift_of(quantizer)
    zero += 0 if quantizer.zero_point is None else round(float(quantizer.zero_point))
    if weight is None:
        return f"{ON_CODES}, in integers where it pays", ""
    if passes_values(weight):
        return f"{ON_CODES}, in float", f"{weight.device.type} multiplies values, in the precision of the step"
    reason = integers_refusal(layer, shape, weight.shape, zero)
    if reason is not None:
        return f"{ON_CODES}, in float", reason
    return f"{ON_CODES}, in integers" + ("" if shape is not None else " where it pays"), ""


def _weight(plan: CodesPlan, node: fx.Node, layer: QuantLayer) -> Tensor | None:
    own = getattr(layer, "weight", None)
    if isinstance(own, Tensor):
        return own
    given: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, fx.Node) or given.op != "get_attr":
        return None
    owner, _, name = str(given.target).rpartition(".")
    found = getattr(plan.model.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None
