"""`sensitivity`: what the grids of each layer cost, one layer at a time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qat.analysis.table import layers_in_order
from qat.contexts import evaluating
from qat.inputs import expect_model
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.switches import named_quantizers, switched

ROLES = ("weight", "activation")


def sensitivity(
    model: nn.Module,
    evaluate: Callable[[nn.Module], Any],
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, Any]:
    """The score of a prepared model with only one layer quantized, and with all but this one, for each of its layers.

    It is measured in eval mode with `disable_fake_quant`'s switches, without training. A layer's activations are the
    quantizers of its inputs. A tensor is quantized once for all that read it: layers that share one share its effect,
    and `shared_with` names them. A quantizer that no layer reads, such as that of a residual sum, has a row of its own.
    What was switched off before stays off.

    Args:
        model: from `prepare`, calibrated; its modes and switches are put back, after an error too. Trained at few bits,
            its weights are none of a float model any more: what training leaves behind shows in `all_but` alone.
        evaluate: from the model to a number, or a dict of numbers, on the same data each time. It is called for the
            model as it is, in float, and then at most six times for each layer.
        progress: wraps the list of what is measured, for a bar: `tqdm`.

    Returns:
        `{"baseline": score, "float": score, "layers": [row, ...]}`: the model as it is, with all quantizers off, and
        the rows in the order in which layers run: `{"name": "conv1", "shared_with": [], "only": {"weight": score,
        "activation": score, "both": score}, "all_but": {...}}`. A part that a layer does not have is left out.

    Raises:
        TypeError: if evaluate cannot be called, or returns neither a number nor a dict of numbers.
        ValueError: if no quantizer is in use.

    >>> import qat
    >>> recipe = qat.QuantRecipe(overrides={"1": {"weight": {"bits": 2}}})
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), recipe)
    >>> x = torch.randn(64, 8)
    >>> qat.calibrate(model, [x])
    >>> with qat.disable_fake_quant(model):
    ...     expected = model.eval()(x)
    >>> found = sensitivity(model, lambda model: -(model(x) - expected).abs().mean())
    >>> min(found["layers"], key=lambda row: row["only"]["both"])["name"]
    '1'
    """
    expect_model(sensitivity, model)
    if not callable(evaluate):
        raise TypeError(f"sensitivity: evaluate must be a callable, got {type(evaluate).__name__}")
    every = [each for each in model.modules() if isinstance(each, Quantizer) and not each.is_disabled]
    if not every:
        raise ValueError("sensitivity: the model has no quantizer in use; call qat.prepare first")
    results: dict[str, Any] = {}
    jobs = [("baseline", every, results), ("float", [], results)]
    rows = operands_of(model)
    layers: list[dict[str, Any]] = []
    for name, parts in rows.items():
        read = set(parts.get("activation", []))
        shared = [
            other for other, its in rows.items() if other != name and read.intersection(its.get("activation", []))
        ]
        layers.append({"name": name, "shared_with": shared, "only": {}, "all_but": {}})
        both = {"both": [each for found in parts.values() for each in found]} if len(parts) == 2 else {}
        for part, chosen in {**parts, **both}.items():
            jobs.append((part, chosen, layers[-1]["only"]))
            jobs.append((part, [each for each in every if each not in chosen], layers[-1]["all_but"]))
    with evaluating(model), torch.no_grad():
        for key, on, into in progress(jobs):
            with switched(every, True), switched(on, False):
                into[key] = _score(evaluate(model))
    for scores in (row[side] for row in layers for side in ("only", "all_but")):
        scores.setdefault("both", next(iter(scores.values())))
    return {**results, "layers": layers}


def operands_of(model: nn.Module) -> dict[str, dict[str, list[Quantizer]]]:
    """The quantizers in use of each layer by role, and of each that no layer reads, in the order in which they run."""
    owned = {name: [each for each in found if not each.is_disabled] for name, _, found in named_quantizers(model)}
    order = layers_in_order(model)
    read = {each for name, module in order if isinstance(module, QuantLayer) for each in owned[name]}
    rows = {}
    for name, module in order:
        by_role = {role: [each for each in owned[name] if each.role == role] for role in ROLES}
        if owned[name] and module not in read:
            rows[name] = {role: found for role, found in by_role.items() if found}
    return rows


def _score(found: Any) -> float | dict[str, float]:
    try:
        if isinstance(found, Mapping):
            return {str(key): float(value) for key, value in found.items()}
        return float(found)
    except (TypeError, ValueError):
        kind = type(found).__name__
        raise TypeError(f"sensitivity: evaluate must return a number or a dict of numbers, got {kind}") from None
