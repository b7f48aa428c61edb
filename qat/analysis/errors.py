"""`layer_errors`: the error of each quantized layer, alone and gathered."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat.analysis.statistics import SAMPLE, sqnr
from qat.contexts import evaluating
from qat.inputs import Batch, expect_model, inputs_and_labels, run_batch
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.switches import disable_fake_quant

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class LayerError:
    """The error of a layer's output in dB, as `quantizer_statistics`; high is good.

    Attributes:
        name: of the layer in the model; "output" for what the model returns, whose `local` is None.
        local: with this layer alone quantized, weight and input, and given what it gets in float.
        cumulative: with the whole model quantized.
    """

    name: str
    local: float | None
    cumulative: float


def layer_errors(model: nn.Module, batch: Batch) -> list[LayerError]:
    """Measure the error that each quantized layer adds, and all that gathers behind.

    Float is the same model with its quantizers switched off. A layer whose `local` is far below its neighbours' is to
    blame; one whose `cumulative` alone is low inherits its error. Of a layer called twice the first call counts.

    Args:
        model: prepared and calibrated; it runs twice in evaluation mode, and is then in the mode that it was in.
        batch: images, as for `calibrate`; some 16 are enough.

    Raises:
        TypeError, ValueError: as `calibrate` does for what it cannot read; ValueError if the model has no quantizer.

    >>> import qat
    >>> x = torch.randn(64, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> [each.name for each in layer_errors(model, x)]
    ['0', '2', 'output']
    """
    expect_model(layer_errors, model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    local: dict[str, Tensor] = {}
    outputs: tuple[dict[str, Tensor], ...] = ({}, {})
    inputs = inputs_and_labels("layer_errors", batch)[0]
    # Quantizers that are off by themselves stay off in both runs.
    in_use = {each for each in model.modules() if isinstance(each, Quantizer) and not each.passes}

    def alone(name: str, layer: QuantLayer, args: Args, kwargs: Kwargs, in_float: Tensor) -> None:
        if name not in local:
            local[name] = sqnr(_sample(in_float), _sample(_quantized_alone(layer, args, kwargs, in_use)))

    def note(seen: dict[str, Tensor], name: str, layer: nn.Module, args: Args, y: Tensor) -> None:
        seen.setdefault(name, _sample(y))

    with evaluating(model), torch.no_grad():
        for seen, in_float in zip(outputs, (True, False), strict=True):
            with ExitStack() as stack:
                if in_float:
                    stack.enter_context(disable_fake_quant(model))
                for name, layer in layers.items():
                    stack.enter_context(layer.register_forward_hook(partial(note, seen, name)))
                    if in_float:
                        stack.enter_context(layer.register_forward_hook(partial(alone, name), with_kwargs=True))
                result = run_batch("layer_errors", model, inputs)
                if isinstance(result, Tensor):
                    seen["output"] = _sample(result)
    # A detector of two stages may look at other boxes when it is quantized, whose tensors are of other shapes.
    alike = {name: x for name, x in outputs[0].items() if name in outputs[1] and x.shape == outputs[1][name].shape}
    gathered = {name: sqnr(x, outputs[1][name]) for name, x in alike.items()}
    # One device synchronisation for all layers.
    numbers = torch.stack([*local.values(), *gathered.values()]).tolist() if gathered else []
    alone_db = dict(zip(local, numbers, strict=False))
    return [
        LayerError(name, alone_db.get(name), value) for name, value in zip(gathered, numbers[len(local) :], strict=True)
    ]


def _quantized_alone(layer: QuantLayer, args: Args, kwargs: Kwargs, in_use: set[Quantizer]) -> Tensor:
    handed = kwargs.get("input_quantizer")
    own = [each for each in (*layer.modules(), handed) if isinstance(each, Quantizer) and each in in_use]
    try:
        for each in own:
            each.is_disabled = False
        on_grid = [handed(x) if isinstance(handed, Quantizer) else x for x in args[:1]]
        y: Tensor = layer.forward(*on_grid, *args[1:], **kwargs)
        return y
    finally:
        for each in own:
            each.is_disabled = True


def _sample(x: Tensor) -> Tensor:
    return x.detach().flatten()[:: 1 + x.numel() // (16 * SAMPLE)].clone()  # the next activation may work in place
