"""Every registered rule in every variant: the grids and options that the tests of the rules use.

WEIGHTS and ACTIVATIONS are the table; the functions below make quantizers, layers and a small model of its rows.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.quantizer import Quantizer, as_rows, create_quantizer, scale_shape
from qat.quantizer.base import Role
from qat.spec import QuantSpec, default_spec

TENSOR = {"granularity": "tensor"}
GROUPS = {"granularity": "group", "group_size": 4}
AFFINE_WEIGHT = {"symmetric": False, "narrow_range": False}
SIGNED = {"signed": True, "symmetric": True}
FROM_ZERO = {"signed": False, "symmetric": True}
EWGS = {"ewgs": "fixed", "ewgs_delta": 0.2}
HESSIAN = {"ewgs": "hessian"}


def plain(**changes: Any) -> QuantSpec:
    """A complete grid: 8 bits, signed, symmetric, per tensor, to its lowest integer, min-max; but for the changes."""
    return default_spec("weight").changed({"granularity": "tensor", "narrow_range": False, "init": "minmax", **changes})


def weight(rule: str, bits: int = 8, *changes: dict[str, Any], **options: Any) -> QuantSpec:
    """The grid of a weight: per channel, symmetric and narrow, unless the changes say otherwise."""
    values: dict[str, Any] = {"granularity": "channel", "narrow_range": True}
    for change in changes:
        values |= change
    return plain(bits=bits, rule=rule, options=options, **values)


def activation(rule: str, bits: int = 8, *changes: dict[str, Any], **options: Any) -> QuantSpec:
    """The grid of an activation: unsigned with a zero point, unless the changes say otherwise."""
    values: dict[str, Any] = {"signed": False, "symmetric": False}
    for change in changes:
        values |= change
    return plain(bits=bits, rule=rule, options=options, **values)


WEIGHTS = {
    "lsq": weight("lsq"),
    "lsq, 2 bits": weight("lsq", 2, {"init": "lsq", "grad_scale": "none"}),
    "lsq, 16 bits": weight("lsq", 16, {"grad_scale": "relative"}),
    "lsq, not narrow": weight("lsq", 4, TENSOR, {"narrow_range": False, "init": "percentile", "percentile": 95.0}),
    "lsq, groups": weight("lsq", 4, GROUPS),
    "lsq, relative": weight("lsq", 4, {"grad_scale": "relative"}),
    "lsq, affine": weight("lsq", 4, AFFINE_WEIGHT),
    "lsq, ewgs": weight("lsq", 3, EWGS),
    "lsq, ewgs groups": weight("lsq", 3, EWGS, GROUPS),
    "lsq, ewgs hessian": weight("lsq", 4, HESSIAN),
    "lsq_plus": weight("lsq_plus", 4, AFFINE_WEIGHT, {"ewgs": "fixed"}),
    "minmax": weight("minmax"),
    "minmax, tensor": weight("minmax", 4, TENSOR),
    "minmax, groups": weight("minmax", 4, GROUPS),
    "minmax, affine": weight("minmax", 4, AFFINE_WEIGHT),
    "minmax, ewgs": weight("minmax", 4, EWGS),
    "ema": weight("ema", momentum=0.25),
    "ema, groups": weight("ema", 4, GROUPS, {"init": "mse"}),
    "ema, affine": weight("ema", 4, AFFINE_WEIGHT),
    "power_of_two": weight("power_of_two"),
    "power_of_two, tensor": weight("power_of_two", 4, TENSOR, EWGS),
    "power_of_two, groups": weight("power_of_two", 4, GROUPS, {"grad_scale": "relative"}),
    "dorefa": weight("dorefa", 4),
    "dorefa, not rescaled": weight("dorefa", 7, TENSOR, rescale=False),
    "dorefa, groups": weight("dorefa", 3, GROUPS),
    "dorefa, 16 bits": weight("dorefa", 16),
    "dorefa, 1 bit": weight("dorefa", 1),
    "apot": weight("apot", 4, normalize=True),
    "apot, not normalised": weight("apot", 4, {"init": "mse"}),
    "apot, 2 bits": weight("apot", 2, TENSOR, normalize=True),
    "apot, 9 bits": weight("apot", 9, normalize=True),
    "apot, groups": weight("apot", 5, GROUPS, normalize=True),
    "binary": weight("binary", 1),
    "binary, approximate": weight("binary", 1, gradient="approximate"),
    "binary, error decay": weight("binary", 1, gradient="error_decay"),
    "binary, straight through": weight("binary", 1, TENSOR, gradient="straight_through"),
    "binary, groups": weight("binary", 1, GROUPS),
    "ternary": weight("ternary", 2),
    "ternary, tensor": weight("ternary", 2, TENSOR),
    "ternary, groups": weight("ternary", 2, GROUPS),
    "ttq": weight("ttq", 2),
    "ttq, tensor": weight("ttq", 2, TENSOR, {"grad_scale": "relative"}, threshold=0.3),
    "ttq, groups": weight("ttq", 2, GROUPS),
    "n2uq": weight("n2uq", 4, TENSOR),
    "n2uq, 2 bits": weight("n2uq", 2, TENSOR, {"init": "lsq"}),
    "n2uq, 8 bits": weight("n2uq", 8, TENSOR, {"narrow_range": False}),
    "dsq": weight("dsq", 4),
    "dsq, tensor": weight("dsq", 2, TENSOR, EWGS, alpha=0.6),
    "dsq, groups": weight("dsq", 4, GROUPS),
    "stacked_sigmoid": weight("stacked_sigmoid", 4),
    "stacked_sigmoid, tensor": weight("stacked_sigmoid", 8, TENSOR, start=2.0, end=40.0),
    "stacked_sigmoid, groups": weight("stacked_sigmoid", 4, GROUPS, EWGS),
    "fp8_e4m3": weight("fp8_e4m3"),
    "fp8_e4m3, tensor": weight("fp8_e4m3", 8, TENSOR, {"grad_scale": "relative"}),
    "fp8_e5m2": weight("fp8_e5m2", 8, GROUPS),
    "mxfp8": weight("mxfp8", block_size=3),
    "mxfp8, e5m2": weight("mxfp8", format="e5m2"),
    "mxfp6": weight("mxfp6", 6, block_size=2),
    "mxfp6, e3m2": weight("mxfp6", 6, TENSOR, format="e3m2", block_size=1),
    "mxfp4": weight("mxfp4", 4, format="e2m1", block_size=4),
    "mxint8": weight("mxint8", format="int8", block_size=4),
    "learned_bits": weight("learned_bits"),
    "learned_bits, tensor": weight("learned_bits", 16, TENSOR, EWGS, least=5, cost=3.0),
    "learned_bits, groups": weight("learned_bits", 4, GROUPS, cost=0.0),
}

ACTIVATIONS = {
    "lsq": activation("lsq", 8, {"init": "mse"}),
    "lsq, signed": activation("lsq", 8, SIGNED, {"grad_scale": "batch"}),
    "lsq, from zero": activation("lsq", 4, FROM_ZERO, {"grad_scale": "relative"}),
    "lsq, signed affine": activation("lsq", 4, {"signed": True}),
    "lsq, 1 bit": activation("lsq", 1, {"init": "lsq"}),
    "lsq, 16 bits": activation("lsq", 16, {"grad_scale": "relative"}),
    "lsq, ewgs": activation("lsq", 4, EWGS),
    "lsq, ewgs hessian": activation("lsq", 4, HESSIAN),
    "lsq_plus": activation("lsq_plus"),
    "lsq_plus, signed": activation("lsq_plus", 4, {"signed": True}, EWGS),
    "minmax": activation("minmax", 8, {"init": "mse"}),
    "minmax, signed": activation("minmax", 4, SIGNED),
    "minmax, ewgs": activation("minmax", 4, EWGS),
    "ema": activation("ema", momentum=0.2),
    "ema, from zero": activation("ema", 4, FROM_ZERO),
    "power_of_two": activation("power_of_two", 8, EWGS),
    "power_of_two, signed": activation("power_of_two", 4, SIGNED),
    "pact": activation("pact", 4),
    "pact, from zero": activation("pact", 4, FROM_ZERO, alpha_decay=0.01),
    "pact, 1 bit": activation("pact", 1, alpha_decay=0.0),
    "pact, 16 bits": activation("pact", 16, {"grad_scale": "relative"}, EWGS),
    "dorefa": activation("dorefa", 4),
    "dorefa, from zero": activation("dorefa", 8, FROM_ZERO),
    "dorefa, 1 bit": activation("dorefa", 1, FROM_ZERO),
    "apot": activation("apot", 4, SIGNED),
    "apot, from zero": activation("apot", 3, FROM_ZERO),
    "binary": activation("binary", 1, SIGNED),
    "binary, approximate": activation("binary", 1, SIGNED, gradient="approximate"),
    "binary, error decay": activation("binary", 1, SIGNED, gradient="error_decay"),
    "binary, straight through": activation("binary", 1, SIGNED, {"init": "mse"}, gradient="straight_through"),
    "n2uq": activation("n2uq", 4, SIGNED),
    "n2uq, from zero": activation("n2uq", 3, FROM_ZERO),
    "n2uq, 1 bit": activation("n2uq", 1, FROM_ZERO, {"init": "mse"}),
    "dsq": activation("dsq", 4),
    "dsq, signed": activation("dsq", 8, SIGNED, EWGS, alpha=0.4),
    "stacked_sigmoid": activation("stacked_sigmoid", 4),
    "stacked_sigmoid, from zero": activation("stacked_sigmoid", 4, FROM_ZERO, start=3.0, end=3.0),
    "fp8_e4m3": activation("fp8_e4m3", 8, SIGNED),
    "fp8_e5m2": activation("fp8_e5m2", 8, SIGNED, {"grad_scale": "none"}),
    "mxfp8": activation("mxfp8", 8, SIGNED, block_size=4),
    "mxfp6": activation("mxfp6", 6, SIGNED, block_size=3),
    "mxfp4": activation("mxfp4", 4, SIGNED, block_size=2),
    "mxint8": activation("mxint8", 8, SIGNED),
    "learned_bits": activation("learned_bits", 8, SIGNED),
    "learned_bits, from zero": activation("learned_bits", 8, FROM_ZERO, least=1, cost=2.0),
    "learned_bits, ewgs": activation("learned_bits", 5, SIGNED, EWGS, cost=0.0),
}

QUANTIZERS: dict[str, tuple[Role, QuantSpec]] = {
    **{f"weight {name}": ("weight", spec) for name, spec in WEIGHTS.items()},
    **{f"activation {name}": ("activation", spec) for name, spec in ACTIVATIONS.items()},
}


def quantizers(chosen: Callable[[Role, QuantSpec], bool]) -> pytest.MarkDecorator:
    """Parametrizes a test with the rows of the table for which this holds."""
    rows = {name: row for name, row in QUANTIZERS.items() if chosen(*row)}
    return pytest.mark.parametrize(("role", "spec"), rows.values(), ids=rows.keys())


every_quantizer = quantizers(lambda role, spec: True)
in_groups = quantizers(lambda role, spec: spec.granularity == "group")


def paired(weights: dict[str, QuantSpec], activations: dict[str, QuantSpec]) -> dict[str, tuple[QuantSpec, QuantSpec]]:
    """The fewest pairs that hold every weight and every activation."""
    count = max(len(weights), len(activations))
    pairs = itertools.islice(zip(itertools.cycle(weights.items()), itertools.cycle(activations.items())), count)
    return {f"{first} x {second}": (one, other) for (first, one), (second, other) in pairs}


LAYERS = paired(WEIGHTS, ACTIVATIONS)
every_layer = pytest.mark.parametrize(("weight_spec", "activation_spec"), LAYERS.values(), ids=LAYERS.keys())

# A recipe takes symmetric weights only, and before its addition a residual branch has negative values.
MODELS = paired({name: spec for name, spec in WEIGHTS.items() if spec.symmetric},
                {name: spec for name, spec in ACTIVATIONS.items() if spec.signed or not spec.symmetric})  # fmt: skip
every_model = pytest.mark.parametrize(("weight_spec", "activation_spec"), MODELS.values(), ids=MODELS.keys())


def tensor_of(role: Role, spec: QuantSpec, seed: int = 0) -> Tensor:
    """A weight of 6 channels, or an activation of 5 samples with a longer tail above than below."""
    generator = torch.Generator().manual_seed(seed)
    if role == "weight":
        return torch.randn(6, 8, 3, 3, generator=generator) * 0.3 + 0.02
    x = torch.randn(5, 8, 3, 3, generator=generator)
    x = torch.where(x < 0, x * 0.4, x)
    return x.abs() if spec.symmetric and not spec.signed else x


def new(role: Role, spec: QuantSpec, device: str | None = None) -> Quantizer:
    """An uncalibrated quantizer for `tensor_of`."""
    return create_quantizer(spec, role, scale_shape(spec, (6, 8, 3, 3)) if role == "weight" else (), device)


def fitted(role: Role, spec: QuantSpec, x: Tensor | None = None) -> Quantizer:
    """A quantizer calibrated on x (default: `tensor_of`), as layers and `qat.calibrate` do it."""
    return copy.deepcopy(_fitted(role, spec)) if x is None else _fit(role, spec, x)


@functools.cache
def _fitted(role: Role, spec: QuantSpec) -> Quantizer:
    return _fit(role, spec, tensor_of(role, spec))


def _fit(role: Role, spec: QuantSpec, x: Tensor) -> Quantizer:
    if role == "weight":
        quantizer = create_quantizer(spec, role, scale_shape(spec, tuple(x.shape)))
        quantizer.fit(as_rows(x, spec), x.numel())
    else:
        quantizer = create_quantizer(spec, role)
        qat.calibrate(quantizer, [x])
    return quantizer


def grid_values(quantizer: Quantizer, x: Tensor) -> Tensor:
    """The values of the codes of x: (codes - zero_point) * scale."""
    scale, zero_point = quantizer.grid(x)
    return (quantizer.codes(x) - zero_point) * scale


class Residual(nn.Module):
    """Convolution, BatchNorm, ReLU, a residual addition, an average and a linear layer.

    Args:
        signed: Hardtanh instead of ReLU; a binary activation of a positive tensor would be constant.
    """

    def __init__(self, signed: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=1.0)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=1.0)
        self.clip = nn.Hardtanh() if signed else nn.ReLU()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.clip(self.bn1(self.conv1(x)))
        x = self.clip(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


LABELS = torch.arange(16) % 4


def images(seed: int = 0) -> Tensor:
    """Sixteen images of four channels; the channel whose number is the label is brighter."""
    x = torch.randn(16, 4, 5, 5, generator=torch.Generator().manual_seed(seed))
    return x + 2 * torch.eye(4)[LABELS][:, :, None, None]


def float_model(signed: bool = False) -> Residual:
    """A `Residual` whose BatchNorms have the statistics of `images`."""
    torch.manual_seed(0)
    model = Residual(signed)
    with torch.no_grad():
        model.fc.weight.mul_(4)
        model(images())
    return model


Overrides = Mapping[str, Mapping[str, Any]]


def uncalibrated(
    weight_spec: QuantSpec, activation_spec: QuantSpec, overrides: Overrides | None = None
) -> torch.fx.GraphModule:
    recipe = qat.QuantRecipe(weight_spec, activation_spec, overrides or {}, residual_bits=activation_spec.bits)
    return qat.prepare(float_model(activation_spec.rule == "binary"), recipe, images())


def prepared(
    weight_spec: QuantSpec, activation_spec: QuantSpec, overrides: Overrides | None = None
) -> torch.fx.GraphModule:
    """The model above, prepared and calibrated, in training mode.

    It is calibrated twice: rules like DoReFa change the size of the weights and so the statistics of BatchNorm.
    """
    model = uncalibrated(weight_spec, activation_spec, overrides)
    qat.calibrate(model, [images()])
    with torch.no_grad():
        model(images())
    qat.calibrate(model, [images()])
    return model
