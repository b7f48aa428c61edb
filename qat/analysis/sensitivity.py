"""`sensitivity`: the cost of each layer's grids, one layer at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from qat.analysis.table import layers_in_order
from qat.contexts import evaluating
from qat.inputs import expect_model
from qat.kernels import plain_formulas
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.switches import named_quantizers, switched


def sensitivity(
    model: nn.Module, evaluate: Callable[[nn.Module], object], progress: Callable[[list[Any]], Iterable[Any]] = iter
) -> dict[str, Any]:
    """Score a model with one layer alone quantized, and with all but it, by layer.

    It is measured in eval mode, without training, with `disable_fake_quant`'s switches: a tensor is quantized once for
    all layers that read it, and they share its effect. What was switched off before stays off.

    Args:
        model: from `prepare`, calibrated; its modes and switches are put back, after an error too.
        evaluate: from the model to its score, of any type. It is called for the model as it is, in float, and then at
            most six times for each layer.
        progress: wraps the list of what is measured, for a bar: `tqdm`.

    Returns:
        `{"baseline": score, "float": score, "layers": [row, ...]}`: the model as it is, with all quantizers off, and
        the rows in the order in which layers run: `{"name": "conv1", "only": {"weight": score, "activation": score,
        "both": score}, "all_but": {...}}`. A part that a layer does not have is left out. A quantizer that no layer
        reads, such as that of a residual sum, has a row of its own.

    Raises:
        ValueError: if no quantizer is in use.

    >>> import qat
    >>> recipe = qat.QuantRecipe(overrides={"1": {"weight": {"bits": 2}}})
    >>> x = torch.randn(64, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), recipe, x)
    >>> qat.calibrate(model, [x])
    >>> with qat.disable_fake_quant(model):
    ...     expected = model.eval()(x)
    >>> found = sensitivity(model, lambda model: -float((model(x) - expected).abs().mean()))
    >>> min(found["layers"], key=lambda row: row["only"]["both"])["name"]
    '1'
    """
    expect_model(sensitivity, model)
    every = _in_use("sensitivity", model)
    results: dict[str, Any] = {"layers": []}
    jobs = [("baseline", every, results), ("float", [], results)]
    for name, parts in operands_of(model).items():
        results["layers"].append({"name": name, "only": {}, "all_but": {}})
        for part, on in parts.items():
            jobs.append((part, on, results["layers"][-1]["only"]))
            jobs.append((part, [each for each in every if each not in on], results["layers"][-1]["all_but"]))
    with evaluating(model), torch.no_grad(), plain_formulas():  # an integer program for each state would not pay
        for key, on, into in progress(jobs):
            with switched(every, True), switched(on, False):
                into[key] = evaluate(model)
    for scores in (row[side] for row in results["layers"] for side in ("only", "all_but")):
        scores.setdefault("both", next(iter(scores.values())))  # a layer with one part alone
    return results


def _in_use(caller: str, model: nn.Module) -> list[Quantizer]:
    every = [each for each in model.modules() if isinstance(each, Quantizer) and not each.is_disabled]
    if not every:
        raise ValueError(f"{caller}: the model has no quantizer in use; call qat.prepare first")
    return every


def operands_of(model: nn.Module) -> dict[str, dict[str, list[Quantizer]]]:
    """Return the quantizers in use by layer and role, or alone if no layer reads them."""
    owned = {name: [each for each in found if not each.is_disabled] for name, _, found in named_quantizers(model)}
    order = layers_in_order(model)
    read = {each for name, module in order if isinstance(module, QuantLayer) for each in owned[name]}
    rows: dict[str, dict[str, list[Quantizer]]] = {}
    for name, module in order:
        parts = {role: [each for each in owned[name] if each.role == role] for role in ("weight", "activation")}
        if owned[name] and module not in read:
            rows[name] = (
                {**parts, "both": owned[name]} if all(parts.values()) else {str(owned[name][0].role): owned[name]}
            )
    return rows
