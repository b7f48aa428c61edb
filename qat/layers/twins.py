"""Which float layers have a quantized twin."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qat.layers import (
    QuantBilinear,
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantGRU,
    QuantLayer,
    QuantLinear,
    QuantLSTM,
    QuantMultiheadAttention,
    QuantRNN,
)
from qat.layers.sharing import share_parameters
from qat.recipe import LayerRecipe

TWINS: dict[type[nn.Module], type[QuantLayer]] = {
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    nn.Conv3d: QuantConv3d,
    nn.ConvTranspose1d: QuantConvTranspose1d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.ConvTranspose3d: QuantConvTranspose3d,
    nn.Linear: QuantLinear,
    nn.Bilinear: QuantBilinear,
    nn.Embedding: QuantEmbedding,
    nn.EmbeddingBag: QuantEmbeddingBag,
}


COMPOSITES: dict[type[nn.Module], Any] = {
    nn.LSTM: QuantLSTM,
    nn.GRU: QuantGRU,
    nn.RNN: QuantRNN,
    nn.MultiheadAttention: QuantMultiheadAttention,
}
"""Layers that are several products, and whose twins quantize what they read themselves."""


COMPOSITE_TWINS: tuple[type[nn.Module], ...] = tuple(COMPOSITES.values())


def float_kind(layer: nn.Module) -> type[nn.Module] | None:
    """The class of torch that a layer computes as, if that has a twin; else None.

    A subclass counts if it only constructs differently, as torchvision's Conv3DSimple.

    >>> class Pointwise(nn.Conv2d):
    ...     def __init__(self, channels):
    ...         super().__init__(channels, channels, 1)
    >>> float_kind(Pointwise(4)).__name__
    'Conv2d'
    """
    own = parametrize.type_before_parametrizations(layer)
    for kind in own.__mro__:
        if kind in TWINS or kind in COMPOSITES:
            same = all(getattr(own, name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward"))
            return kind if same else None
    return None


def kind_name(layer: nn.Module) -> str:
    """The name of the class by which a recipe speaks of a layer."""
    return (float_kind(layer) or parametrize.type_before_parametrizations(layer)).__name__


def make_twin(name: str, layer: nn.Module, chosen: LayerRecipe) -> nn.Module:
    """The quantized twin of a layer, its input quantized elsewhere; that of a composite one quantizes its own inputs.

    Raises:
        ValueError: if the grid does not fit the weight.
    """
    kind = float_kind(layer)
    assert kind is not None, f"{name} has no twin"
    if kind in COMPOSITES:
        return _make_composite(name, layer, COMPOSITES[kind], chosen)
    if parametrize.type_before_parametrizations(layer) is not kind:
        plain = kind(**TWINS[kind].constructor_arguments(layer), device="meta")
        share_parameters(layer, plain)
        layer = plain.train(layer.training)
    try:
        return TWINS[kind].from_float(layer, chosen.weight)
    except ValueError as error:  # a group size that does not divide, NaN in the weight
        raise ValueError(f"prepare: {name} (weight): {error}") from error


def _make_composite(name: str, layer: nn.Module, twin: Any, chosen: LayerRecipe) -> nn.Module:
    try:
        made: nn.Module = twin.from_float(layer, chosen.weight, chosen.activation)
        return made
    except (TypeError, ValueError) as error:
        raise ValueError(f"prepare: {name}: {error}") from error
