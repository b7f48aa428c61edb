"""The quantized twins of torch's layers."""

from qat.layers.base import QuantLayer
from qat.layers.conv import QuantConv2d
from qat.layers.folding import IntegerWeight, fold_weight
from qat.layers.function import QuantFunction
from qat.layers.linear import QuantLinear

__all__ = ["IntegerWeight", "QuantConv2d", "QuantFunction", "QuantLayer", "QuantLinear", "fold_weight"]
