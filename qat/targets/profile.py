"""`TargetProfile`: a runtime's grids, and what it computes in integers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qat.spec import Granularity, QuantSpec, Role, default_spec
from qat.text import check_types

Operation = Literal[
    "add", "avg_pool", "cat", "div", "elu", "gelu", "group_norm", "hardsigmoid", "hardswish", "instance_norm",
    "interpolate", "layer_norm", "leaky_relu", "log_softmax", "matmul", "max_pool", "maximum", "mean", "minimum",
    "mish", "mul", "prelu", "sigmoid", "silu", "softmax", "stack", "sub", "tanh",
]  # fmt: skip
"""Operations between layers, with one name for module, function and method. Operations that only move values (reshape,
permute, slice, pad with zeros, nearest interpolation) are not listed: no target requantizes them."""

TieRule = Literal["away", "up"]
"""How a tie of stored integers k and k + 1 is rounded: to k + 1, with "away" to k where k < 0."""


@dataclass(frozen=True)
class GridLimits:
    """The grids of weights, or of activations, on which a runtime computes.

    Args:
        most_bits: the largest number of bits.
        lowest: the lowest integer; -127 if a kernel excludes -128, -64 if pairs of products have to fit 16 bits.
        signed: the values of `QuantSpec.signed` that it accepts.
        symmetric: the values of `QuantSpec.symmetric` that it accepts.
        granularities: the values of `QuantSpec.granularity` that it accepts.
    """

    most_bits: int
    lowest: int
    signed: tuple[bool, ...]
    symmetric: tuple[bool, ...]
    granularities: tuple[Granularity, ...]

    def __post_init__(self) -> None:
        check_types(GridLimits, vars(self))


@dataclass(frozen=True)
class Reason:
    """The reason for a choice in a profile.

    Args:
        text: the end of the sentence "because ...".
        source: address of the page, or file of the package, that says so; "" for a limit of this library.
    """

    text: str
    source: str = ""


@dataclass(frozen=True)
class TargetProfile:
    """The operations that a runtime computes in integers, and their grids.

    Args:
        name: name of the runtime.
        weight: default grid of weights; what it leaves open is that of `qat.spec.default_spec`.
        activation: default grid of activations, in the same way.
        weight_limits: grids of weights that it runs.
        activation_limits: grids of activations that it runs.
        shared_grids: operations whose inputs and output must share one grid.
        float_operations: operations that it computes in float even between quantized tensors.
        quantizes_outputs: True if the model's outputs are integers too.
        reasons: a field ("activation"), or a field of a limit ("activation.signed"), to the reason for its value.
        float_biases: True if a file holds biases as the floats that they stand for, since the runtime reads no int32
            behind DequantizeLinear.
        fixed_grids: operations whose result has one grid in all kernels, to its scale and zero point; their quantizers
            keep to it, and have the bits of `activation`.
        split_operations: operations that it computes faster in two steps, each with a grid: silu(x) = x * sigmoid(x).
            Where it could compute them in float, 8 bits alone are split.
        ties: how kernels round ties of averages on shared grids, and of sums on powers of two; else as float32 does.
        file: what its models are written to; `prepare` warns of what `export_litert` would refuse.

    >>> from qat.targets import profile_of
    >>> profile_of("tensorrt").refusal("activation", QuantSpec(signed=False))
    'an unsigned activation does not run on tensorrt: its INT8 is signed; use signed=True'
    """

    name: str
    weight: QuantSpec
    activation: QuantSpec
    weight_limits: GridLimits
    activation_limits: GridLimits
    shared_grids: frozenset[Operation]
    float_operations: frozenset[Operation]
    quantizes_outputs: bool
    reasons: Mapping[str, Reason] = field(default_factory=dict, hash=False)
    float_biases: bool = False
    fixed_grids: Mapping[Operation, tuple[float, int]] = field(default_factory=dict, hash=False)
    split_operations: frozenset[Operation] = frozenset()
    ties: Mapping[Operation, TieRule] = field(default_factory=dict, hash=False)
    file: Literal["onnx", "tflite"] = "onnx"

    def __post_init__(self) -> None:
        check_types(TargetProfile, vars(self))
        object.__setattr__(self, "weight", self.weight.resolved(default_spec("weight")))
        object.__setattr__(self, "activation", self.activation.resolved(default_spec("activation")))

    def refusal(self, tensor: Role, spec: QuantSpec) -> str | None:
        """Return why a grid does not run and what to use instead; None if it runs."""
        limits = self.weight_limits if tensor == "weight" else self.activation_limits
        spec = spec.resolved(self.weight if tensor == "weight" else self.activation)
        if spec.granularity not in limits.granularities:
            choices = " or ".join(map(repr, limits.granularities))
            return f"{tensor} granularity {spec.granularity!r} has no integer kernel in {self.name}; use {choices}"
        if spec.signed not in limits.signed:
            kind = "a signed" if spec.signed else "an unsigned"
            fix = f"signed={not spec.signed}{' and narrow_range=False' if spec.narrow_range else ''}"
            return self._sentence(f"{kind} {tensor}", f"{tensor}.signed", fix)
        if spec.symmetric not in limits.symmetric:
            kind = "a symmetric" if spec.symmetric else "an affine"
            return self._sentence(f"{kind} {tensor}", f"{tensor}.symmetric", f"symmetric={not spec.symmetric}")
        one = "a weight" if tensor == "weight" else "an activation"
        if spec.bits > limits.most_bits:
            fix = f"at most {limits.most_bits} bits"
            return self._sentence(f"{one} of {spec.bits} bits", f"{tensor}.most_bits", fix)
        if spec.qmin < limits.lowest:
            mirrored = replace(spec, narrow_range=True).qmin >= limits.lowest  # -127 is low enough
            fix = "narrow_range=True" if mirrored else f"max_magnitude={-limits.lowest}"
            return self._sentence(f"{one} down to {spec.qmin}", f"{tensor}.lowest", fix)
        return None

    def _sentence(self, subject: str, key: str, fix: str) -> str:
        reason = self.reasons.get(key)  # a profile of the user's own may give none
        return f"{subject} does not run on {self.name}{f': {reason.text}' if reason else ''}; use {fix}"
