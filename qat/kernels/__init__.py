"""Fast kernels of the hot estimators, chosen by device; the plain formulas in qat.functional are their reference."""

from qat.kernels.choice import Kernels, choose, plain_here
from qat.kernels.switches import (
    float_products,
    formulas_wanted,
    integers_allowed,
    kernels_by_formula,
    plain_formulas,
    plain_wanted,
)

__all__ = [
    "Kernels",
    "choose",
    "float_products",
    "formulas_wanted",
    "integers_allowed",
    "kernels_by_formula",
    "plain_formulas",
    "plain_here",
    "plain_wanted",
]
