"""Fast kernels by device; the formulas in qat.functional are their reference."""

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
