"""Fast kernels for the costliest estimators, chosen by device; the formulas in qat.functional are their reference."""

from qat.kernels.dispatch import (
    choose,
    float_products,
    formulas_wanted,
    integers_allowed,
    kernels_by_formula,
    plain_formulas,
    plain_here,
    plain_wanted,
)

__all__ = [
    "choose",
    "float_products",
    "formulas_wanted",
    "integers_allowed",
    "kernels_by_formula",
    "plain_formulas",
    "plain_here",
    "plain_wanted",
]
