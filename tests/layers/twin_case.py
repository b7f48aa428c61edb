"""Every quantized twin with its float layer and inputs, grids for single layers, and products on grids in NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import qat
from qat.quantizer import Quantizer, create_quantizer
from qat.spec import QuantSpec

SHAPES = {1: (13,), 2: (9, 7), 3: (6, 5, 7)}
GEOMETRIES: list[tuple[bool, dict[str, Any]]] = [
    (False, {"kernel_size": 3, "padding": 1}),
    (False, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}),
    (False, {"kernel_size": 2, "groups": 4, "bias": False}),
    (False, {"kernel_size": 3, "padding": 2, "padding_mode": "replicate", "groups": 2}),
    (False, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    (False, {"kernel_size": 2, "padding": 1, "padding_mode": "circular"}),
    (True, {"kernel_size": 3}),
    (True, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}),
    (True, {"kernel_size": 2, "stride": 3, "groups": 4, "bias": False}),
    (True, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2, "output_padding": 1}),
]
"""Whether the convolution is a transposed one, and its options."""

ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False, "num_heads": 1},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "batch_first": True},
    "bias_kv and zero attention": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 5, "vdim": 7},
    "other widths without bias": {"kdim": 5, "bias": False, "add_bias_kv": True, "batch_first": True},
}
RECURRENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "lstm projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    "lstm stacked": (nn.LSTM, {"num_layers": 3, "batch_first": True}),
    "gru": (nn.GRU, {}),
    "gru without bias": (nn.GRU, {"bias": False, "batch_first": True}),
    "gru both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
}


class Case(NamedTuple):
    """A float layer with the arguments of its constructor, inputs for it, and a weight that can be parametrized."""

    float_type: Any
    arguments: dict[str, Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    weight: str = "weight"

    @property
    def twin_type(self) -> Any:
        return getattr(qat.layers, f"Quant{self.float_type.__name__}")


def convolution(axes: int, transposed: bool) -> Any:
    return getattr(nn, f"Conv{'Transpose' if transposed else ''}{axes}d")


def drawn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def indices() -> tuple[Tensor]:
    return (torch.tensor([[1, 2, 0, 7], [7, 7, 9, 0], [3, 1, 7, 7]]),)


def cases() -> dict[str, Case]:
    linear, table = {"in_features": 7, "out_features": 3}, {"num_embeddings": 11, "embedding_dim": 6}
    limited = {**table, "padding_idx": 2, "max_norm": 1.0, "norm_type": 1.0}
    found = {
        "linear": Case(nn.Linear, linear, drawn((2, 7))),
        "linear without bias": Case(nn.Linear, {**linear, "bias": False}, drawn((2, 7))),
        "embedding": Case(nn.Embedding, table, indices),
        "embedding, limited": Case(nn.Embedding, {**limited, "scale_grad_by_freq": True}, indices),
        "embedding, sparse": Case(nn.Embedding, {**table, "sparse": True}, indices),
    }
    for axes, shape in SHAPES.items():
        for transposed, options in GEOMETRIES:
            arguments = {"in_channels": 8, "out_channels": 12, **options}
            kind = convolution(axes, transposed)
            found[f"{kind.__name__} {options}"] = Case(kind, arguments, drawn((2, 8, *shape)))
    for name, options in ATTENTIONS.items():
        sizes = (4, 8), (6, options.get("kdim", 8)), (6, options.get("vdim", 8))
        shapes = [(3, *each) if "batch_first" in options else (each[0], 3, each[1]) for each in sizes]
        weight = "q_proj_weight" if "kdim" in options else "in_proj_weight"
        arguments = {"embed_dim": 8, "num_heads": 2, **options}
        found[f"attention, {name}"] = Case(nn.MultiheadAttention, arguments, drawn(*shapes), weight)
    for name, (kind, options) in RECURRENT.items():
        arguments = {"input_size": 4, "hidden_size": 6, **options}
        found[name] = Case(kind, arguments, drawn((3, 2, 4)), "weight_hh_l0")
    return found


CASES = cases()


def activations(model: nn.Module) -> list[Quantizer]:
    return [part for part in model.modules() if isinstance(part, Quantizer) and part.role == "activation"]


def fine_twin(layer: nn.Module) -> Any:
    """The twin of a float layer on 16-bit grids that reach to 6, and to 1 for probabilities."""
    kind: Any = getattr(qat.layers, f"Quant{type(layer).__name__}")
    twin = kind.from_float(layer, QuantSpec(bits=16), QuantSpec(bits=16, signed=False, symmetric=False, init="minmax"))
    for quantizer in activations(twin):
        reach = 6.0 if not quantizer.spec.symmetric or quantizer.spec.signed else 1.0
        quantizer.set_range(torch.tensor(-reach), torch.tensor(reach))
    return twin


def grid_for(x: Tensor, bits: int = 8) -> Quantizer:
    """A calibrated unsigned affine quantizer for x."""
    quantizer = create_quantizer(QuantSpec(bits=bits, signed=False, symmetric=False))
    quantizer.set_range(x.min().clamp(max=0), x.max().clamp(min=0))
    return quantizer


def trained_norm(channels: int, axes: int = 2) -> Any:
    """A BatchNorm with gammas of both signs, one of them exactly zero."""
    norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](channels).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels))
        norm.weight[0], norm.weight[1] = 0.0, -0.7
        norm.bias.copy_(torch.randn(channels))
        norm.running_mean.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.1)
    return norm


def assert_learns(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.to_dense()
        assert bool(grad.isfinite().all()), name
        assert bool((grad != 0).any()), f"{name} does not learn"


Array = NDArray[np.float64]


def grid_codes(quantizer: Any, x: Array) -> tuple[Array, Array]:
    """Integers without the zero point, and their step."""
    step, zero = (value.detach().double().numpy() for value in quantizer.grid())
    return np.clip(np.rint(x / step) + zero, quantizer.spec.qmin, quantizer.spec.qmax) - zero, step


def grid_product(layer: Any, x: Array, weight: Tensor, bias: Tensor | None, integers: bool) -> Array:
    """x W^T + b on the layer's grids: in float, or int64 sums with the bias rounded to their unit."""
    x_codes, step = grid_codes(layer.input_quantizer, x)
    w_codes, w_step = grid_codes(layer.weight_quantizer, weight.detach().numpy())
    offset = np.zeros(len(w_codes)) if bias is None else bias.detach().numpy()
    if not integers:
        return (x_codes * step) @ (w_codes * w_step).T + offset
    unit = step * w_step.reshape(-1)
    return (x_codes.astype(np.int64) @ w_codes.astype(np.int64).T + np.rint(offset / unit).astype(np.int64)) * unit
