"""Quantizer modules with learnable parameters, and the one registry of their rules."""

from qat.quantizer.base import Quantizer
from qat.quantizer.granularity import as_rows, scale_shape
from qat.quantizer.lsq import LSQPlusQuantizer, LSQQuantizer
from qat.quantizer.observer import RangeObserver
from qat.quantizer.registry import create_quantizer, register_quantizer, registered_quantizers

__all__ = [
    "LSQPlusQuantizer",
    "LSQQuantizer",
    "Quantizer",
    "RangeObserver",
    "as_rows",
    "create_quantizer",
    "register_quantizer",
    "registered_quantizers",
    "scale_shape",
]
