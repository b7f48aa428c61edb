"""Fast kernels for the costliest estimators, chosen by device; the formulas in qat.functional are their reference."""

from qat.kernels.dispatch import (
    choose,
    float_products,
    integers_allowed,
    plain_formulas,
    plain_here,
    plain_wanted,
)

__all__ = [
    "choose",
    "float_products",
    "integers_allowed",
    "plain_formulas",
    "plain_here",
    "plain_wanted",
]
