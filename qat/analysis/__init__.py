"""Looking at prepared models: what is quantized, how, and what stays in float and why, how it trains."""

from qat.analysis.explain import explain
from qat.analysis.table import summary

__all__ = ["explain", "summary"]
