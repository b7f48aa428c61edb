"""Fast kernels by device, for the costliest estimators of qat.functional."""

from qat.kernels.dispatch import (
    choose,
    float_products,
    integers_allowed,
    passes_values,
    plain_formulas,
    plain_here,
    plain_wanted,
    triton_here,
)

__all__ = [
    "choose",
    "float_products",
    "integers_allowed",
    "passes_values",
    "plain_formulas",
    "plain_here",
    "plain_wanted",
    "triton_here",
]
