"""Switches of a model's quantizers: fake quantization off and on, scales frozen."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from torch import fx, nn

from qat.graph.nodes import submodule_of
from qat.inputs import expect_model
from qat.layers import QuantLayer
from qat.layers.twins import QuantTwin
from qat.quantizer import Quantizer
from qat.recipe import TYPE_PREFIX, QuantRecipe, pattern_of
from qat.text import check_types, did_you_mean

Layers = str | type[nn.Module] | Iterable[str | type[nn.Module]]  # names, patterns or float classes


def disable_fake_quant(
    model: nn.Module, layers: Layers = "*", *, weights: bool = True, activations: bool = True
) -> ExitStack:
    """Switch quantization off for a layer, some layers, or all.

    They compute in float, in training and evaluation. It holds until `enable_fake_quant`; in a `with` statement until
    its end. Ranges stay as they are, and do not learn meanwhile; `calibrate` sets them all the same. `summary` and
    `explain` name what is off, and `export_onnx` and `integer_weights` refuse it: to deploy a layer in float, prepare
    with `overrides={"fc": {"skip": True}}`. The state dict remembers what is off (`<quantizer>.disabled`, there only
    while it is), and loading one switches accordingly.

    In a prepared model a tensor is quantized once, for all that read it. A layer's activations are the quantizers of
    its inputs: switched off, they pass float to the other layers that read them too.

    `layers` is one pattern or several, as in a recipe's `overrides`: the name of a layer, or of a block with all that
    is in it, as in fnmatch; or a float class, `nn.Linear` or "type:Linear"; or the name of a quantizer. A pattern that
    names nothing, or nothing with a quantizer of the wanted kind, is a ValueError; what is neither text nor a class,
    such as the layer itself, a TypeError. The context manager that is returned puts all of these switches back to what
    they were before the call.

    >>> import torch, qat
    >>> x = torch.randn(64, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> with qat.disable_fake_quant(model, "1"):
    ...     without = model(x)
    >>> torch.equal(without, model(x))
    False
    """
    expect_model(disable_fake_quant, model)
    return switched(_selected("disable_fake_quant", model, layers, weights, activations), True)


def enable_fake_quant(
    model: nn.Module, layers: Layers = "*", *, weights: bool = True, activations: bool = True
) -> ExitStack:
    """Switch quantization on again.

    Arguments, result and errors are those of `disable_fake_quant`.

    >>> import torch, qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 2)), example_inputs=torch.randn(4, 8))
    >>> switch = qat.disable_fake_quant(model)
    >>> switch = qat.enable_fake_quant(model, activations=False)
    >>> [name for name, each in model.named_modules() if isinstance(each, qat.Quantizer) and each.is_disabled]
    ['input_quantizer']
    """
    expect_model(enable_fake_quant, model)
    return switched(_selected("enable_fake_quant", model, layers, weights, activations), False)


def freeze_scales(model: nn.Module, frozen: bool = True) -> int:
    """Freeze every range while weights go on learning, as many recipes end.

    Learned scales, zero points, clipping levels and bit widths get no gradient; ranges that follow the data (`minmax`,
    `ema`) stay; `calibrate` leaves them alone and says so. Rules that compute a scale from the weight in every step
    (`dorefa`, `binary`, `ternary`) have none to keep. Values are still rounded, on both paths of training, and
    evaluation and export use the frozen ranges. The state dict remembers it (`<quantizer>.frozen`, there only while it
    is set), and loading one freezes or unfreezes accordingly: load first, then freeze.

    An optimizer may keep the frozen parameters: without a gradient it leaves them alone. With frozen=False ranges
    learn, or follow the data, again. Returns the number of quantizers, and raises a ValueError without any.

    >>> from qat import QuantLinear
    >>> layer = QuantLinear(4, 2)
    >>> freeze_scales(layer)
    2
    >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    ['weight', 'bias']
    """
    expect_model(freeze_scales, model, locals())
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    if not quantizers:
        raise ValueError("freeze_scales: the model has no quantizer; call qat.prepare first")
    for quantizer in quantizers:
        quantizer.freeze(frozen)
    return len(quantizers)


def switched(quantizers: list[Quantizer], disabled: bool) -> ExitStack:
    """Switch quantizers; the context's end puts every one back."""
    undo = ExitStack()
    for quantizer in quantizers:  # the present state is restored, which an outer switch may have set
        undo.callback(setattr, quantizer, "is_disabled", quantizer.is_disabled)
        quantizer.is_disabled = disabled
    return undo


def _selected(caller: str, model: nn.Module, layers: Layers, weights: bool, activations: bool) -> list[Quantizer]:
    check_types(_selected, locals(), caller)
    roles = {role for role, wanted in (("weight", weights), ("activation", activations)) if wanted}
    if not roles:
        raise ValueError(f"{caller}: weights and activations are both False; one of them must be True")
    named = list(named_quantizers(model))
    if not named:
        raise ValueError(f"{caller}: the model has no quantizer; call qat.prepare first")
    found: dict[Quantizer, None] = {}
    for wanted in layers if isinstance(layers, Iterable) and not isinstance(layers, (str, nn.Module)) else [layers]:
        pattern = pattern_of(wanted)
        if pattern is None:
            raise TypeError(f"{caller}: layers are given by name or by class, got {type(wanted).__name__}")
        matched = [owned for name, kind, owned in named if QuantRecipe.matches(pattern, name, kind)]
        if not matched:
            names = [name for name, _, _ in named]
            kinds = sorted({f"{TYPE_PREFIX}{kind}" for _, kind, _ in named if kind})
            known = kinds if pattern.startswith(TYPE_PREFIX) else names
            hint = did_you_mean(pattern, known, count=3) or f"layers are called {', '.join(names[:3])} ..."
            raise ValueError(f"{caller}: {pattern!r} names no quantized layer or quantizer of the model; {hint}")
        chosen = [each for owned in matched for each in owned if each.role in roles]
        if not chosen:
            raise ValueError(f"{caller}: {pattern!r} has no quantizer of {' or '.join(sorted(roles))}s")
        found |= dict.fromkeys(chosen)
    return list(found)


def named_quantizers(model: nn.Module) -> Iterator[tuple[str, str | None, list[Quantizer]]]:
    """Yield (name, name of float class, quantizers) of layers and of quantizers."""
    handed = _handed(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Quantizer):
            yield name, None, [module]
        elif isinstance(module, QuantTwin):
            own = [each for each in module.modules() if isinstance(each, Quantizer)]
            float_type = getattr(module, "float_type", type(module))  # a twin that was never registered has none
            yield name, float_type.__name__, own + handed.get(module, [])


def _handed(model: nn.Module) -> dict[nn.Module, list[Quantizer]]:
    found: dict[nn.Module, list[Quantizer]] = {}
    for part in model.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            layer = submodule_of(part, node)
            given = node.kwargs.get("input_quantizer")
            # the graph hands quantizers of tensors to the layers that read them
            if isinstance(layer, QuantLayer) and isinstance(given, fx.Node):
                handed = part.get_submodule(str(given.target))
                found.setdefault(layer, []).extend([handed] if isinstance(handed, Quantizer) else [])
    return found
