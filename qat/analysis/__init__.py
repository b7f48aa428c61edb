"""Looking at prepared models: what is quantized, how, and what stays in float and why."""

from qat.analysis.table import summary

__all__ = ["summary"]
