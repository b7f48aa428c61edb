"""What a target profile says: the grids that a runtime computes on, and which operations it computes in integers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qat.spec import Granularity, QuantSpec

Tensor = Literal["weight", "activation"]

Operation = Literal[
    "add", "avg_pool", "cat", "div", "elu", "gelu", "group_norm", "hardsigmoid", "hardswish", "instance_norm",
    "interpolate", "layer_norm", "leaky_relu", "log_softmax", "matmul", "max_pool", "maximum", "mean", "minimum",
    "mish", "mul", "prelu", "sigmoid", "silu", "softmax", "stack", "sub", "tanh",
]  # fmt: skip
"""What is computed between layers; one name for the module, the function and the method. Operations that only move
values (reshape, permute, slice, pad with zeros, nearest interpolation) are not listed: no target requantizes there."""


@dataclass(frozen=True)
class GridLimits:
    """The grids of one kind of tensor that a runtime computes on.

    Args:
        most_bits: widest integers.
        lowest: lowest integer; -127 where a kernel leaves -128 out, -64 where pairs of products have to fit 16 bits.
        signed: which values of `QuantSpec.signed` it takes.
        symmetric: which values of `QuantSpec.symmetric` it takes.
        granularities: which values of `QuantSpec.granularity` it takes.
    """

    most_bits: int
    lowest: int
    signed: tuple[bool, ...]
    symmetric: tuple[bool, ...]
    granularities: tuple[Granularity, ...]


@dataclass(frozen=True)
class Reason:
    """Why a profile chooses as it does.

    Args:
        text: the end of the sentence "it is so because ...".
        source: address of the page, or file of the package, that says so; "" where it is this library's own limit.
    """

    text: str
    source: str = ""


@dataclass(frozen=True)
class TargetProfile:
    """What a runtime computes in integers, and on which grids.

    Args:
        name: the runtime.
        weight: grid of weights where the recipe names none.
        activation: grid of activations where the recipe names none.
        weight_limits: grids of weights that it runs.
        activation_limits: grids of activations that it runs.
        shared_grids: operations whose inputs and output have to lie on one grid.
        float_operations: operations that it computes in float even between quantized tensors.
        quantizes_outputs: whether the model's own outputs are integers too.
        reasons: field ("activation"), or field of a limit ("activation.signed"), to the reason for its value.

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

    def refusal(self, tensor: Tensor, spec: QuantSpec) -> str | None:
        """Why the runtime does not run this grid, and what would be right, in one clause; None if it does.

        Args:
            tensor: "weight" or "activation".
            spec: the grid.
        """
        limits = self.weight_limits if tensor == "weight" else self.activation_limits
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
            mirrored = replace(spec, narrow_range=True).qmin >= limits.lowest
            fix = "narrow_range=True" if mirrored else f"max_magnitude={-limits.lowest}"
            return self._sentence(f"{one} down to {spec.qmin}", f"{tensor}.lowest", fix)
        return None

    def _sentence(self, subject: str, key: str, fix: str) -> str:
        reason = self.reasons.get(key)  # a profile of the user's own may give none
        return f"{subject} does not run on {self.name}{f': {reason.text}' if reason else ''}; use {fix}"
