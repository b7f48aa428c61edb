"""`sensitivity`: what the grids of each layer cost, one layer at a time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from qat.analysis.table import layers_in_order
from qat.contexts import evaluating
from qat.inputs import expect_model
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.switches import named_quantizers, switched

Score = float | dict[str, float]


class Operands(NamedTuple):
    """The quantizers in use of a layer's weight and of its inputs; `shared_with` names layers that read the same."""

    weight: list[Quantizer]
    activation: list[Quantizer]
    shared_with: list[str]


def sensitivity(
    model: nn.Module,
    evaluate: Callable[[nn.Module], Any],
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, Any]:
    """The score of a prepared model with only one layer quantized, and with all but this one, for each of its layers.

    It is measured in eval mode, with `disable_fake_quant`'s switches, without training: after a change of bits,
    training recovers some of what it shows. A layer's activations are the quantizers of its inputs. A tensor is
    quantized once for all that read it, so layers that share one share its effect; `shared_with` names them. A
    quantizer that no layer reads, such as that of a residual sum, has a row of its own. What is switched off before
    stays off.

    Args:
        model: from `prepare`, calibrated or trained; its modes and switches are put back, after an error too.
        evaluate: from the model to a number, or a dict of numbers; it has to use the same data each time. It is called
            for the model as it is, in float, and then at most six times for each layer.
        progress: wraps the list of what is measured, for a bar: `tqdm`.

    Returns:
        `{"baseline": score, "float": score, "layers": [row, ...]}`: the model as it is, with all quantizers off, and
        a row for each layer in the order in which they run: `{"name": "conv1", "shared_with": [], "only": {"weight":
        score, "activation": score, "both": score}, "all_but": {...}}`. A part that a layer does not have is left out.

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
    rows = operands_of(model)
    every = [each for each in model.modules() if isinstance(each, Quantizer) and not each.is_disabled]
    if not every:
        raise ValueError("sensitivity: the model has no quantizer in use; call qat.prepare first")
    jobs: list[tuple[Any, ...]] = [("baseline", every), ("float", [])]
    layers: list[dict[str, Any]] = []
    for name, row in rows.items():
        found: dict[str, Any] = {"name": name, "shared_with": row.shared_with, "only": {}, "all_but": {}}
        parts = {key: value for key, value in (("weight", row.weight), ("activation", row.activation)) if value}
        for part, chosen in {**parts, "both": row.weight + row.activation}.items():
            if part != "both" or len(parts) == 2:
                jobs.append((part, chosen, found["only"]))
                jobs.append((part, [each for each in every if each not in chosen], found["all_but"]))
        layers.append(found)
    results: dict[str, Any] = {}
    with evaluating(model), torch.no_grad():
        for key, on, *into in progress(jobs):
            with switched(every, True), switched(on, False):
                (into[0] if into else results)[key] = _score(evaluate(model))
    for scores in (row[side] for row in layers for side in ("only", "all_but")):
        scores.setdefault("both", next(iter(scores.values())))
    return {**results, "layers": layers}


def operands_of(model: nn.Module) -> dict[str, Operands]:
    """The quantizers in use of each layer, and of each that no layer reads, in the order in which they run."""
    owned = {name: [each for each in found if not each.is_disabled] for name, _, found in named_quantizers(model)}
    order = [(name, owned[name], isinstance(module, QuantLayer)) for name, module in layers_in_order(model)]
    readers: dict[Quantizer, list[str]] = {}
    for name, quantizers, is_layer in order:
        for each in quantizers if is_layer else ():
            readers.setdefault(each, []).append(name)
    rows = {}
    for name, quantizers, is_layer in order:
        if quantizers and (is_layer or quantizers[0] not in readers):
            weight, activation = (
                [each for each in quantizers if each.role == role] for role in ("weight", "activation")
            )
            shared = dict.fromkeys(other for each in activation for other in readers.get(each, []) if other != name)
            rows[name] = Operands(weight, activation, list(shared))
    return rows


def _score(found: Any) -> Score:
    try:
        if isinstance(found, Mapping):
            return {str(key): float(value) for key, value in found.items()}
        return float(found)
    except (TypeError, ValueError):
        kind = type(found).__name__
        raise TypeError(f"sensitivity: evaluate must return a number or a dict of numbers, got {kind}") from None
