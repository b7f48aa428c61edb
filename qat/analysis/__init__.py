"""Views of prepared models: what is quantized, what stays in float, how it trains."""

from qat.analysis.explain import explain
from qat.analysis.table import summary

__all__ = ["explain", "summary"]
