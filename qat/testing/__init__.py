"""`ste_gradcheck`: check an estimator against the gradient that it declares."""

from qat.testing.gradcheck import CHECKS, grid_points, ste_gradcheck
from qat.testing.report import CheckResult, GradcheckError, GradcheckReport

__all__ = ["CHECKS", "CheckResult", "GradcheckError", "GradcheckReport", "grid_points", "ste_gradcheck"]
