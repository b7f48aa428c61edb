"""Quantized twins of torch's layers, and `register_twin` for your own."""

from qat.layers.attention import QuantMultiheadAttention
from qat.layers.base import QuantLayer
from qat.layers.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from qat.layers.embedding import IntegerTable, QuantEmbedding
from qat.layers.folding import IntegerWeight, fold_weight
from qat.layers.function import QuantFunction
from qat.layers.linear import QuantLinear
from qat.layers.recurrent import QuantGRU, QuantLSTM
from qat.layers.twins import register_twin

__all__ = [
    "IntegerTable",
    "IntegerWeight",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantFunction",
    "QuantGRU",
    "QuantLSTM",
    "QuantLayer",
    "QuantLinear",
    "QuantMultiheadAttention",
    "fold_weight",
    "register_twin",
]
