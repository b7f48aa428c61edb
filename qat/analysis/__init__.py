"""Reports on prepared models: what is quantized and how, what stays in float and why."""

from qat.analysis.table import summary

__all__ = ["summary"]
