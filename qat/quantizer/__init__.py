"""Quantizer modules with learnable parameters, and the registry of their rules."""

from qat.quantizer.base import Quantizer
from qat.quantizer.granularity import as_rows, scale_shape
from qat.quantizer.observer import RangeObserver
from qat.quantizer.registry import create_quantizer, register_quantizer, registered_quantizers
from qat.quantizer.rules.binary import BinaryQuantizer, TernaryQuantizer, TTQQuantizer
from qat.quantizer.rules.clipped import DoReFaQuantizer, PACTQuantizer
from qat.quantizer.rules.floats import (
    E4M3Quantizer,
    E5M2Quantizer,
    MXFP4Quantizer,
    MXFP6Quantizer,
    MXFP8Quantizer,
    MXINT8Quantizer,
)
from qat.quantizer.rules.learned_bits import LearnedBitsQuantizer
from qat.quantizer.rules.levels import APoTQuantizer, N2UQQuantizer
from qat.quantizer.rules.lsq import LSQPlusQuantizer, LSQQuantizer, PowerOfTwoQuantizer
from qat.quantizer.rules.observed import EMAQuantizer, MinMaxQuantizer
from qat.quantizer.rules.soft import DSQQuantizer, StackedSigmoidQuantizer
from qat.quantizer.training import parameter_groups, penalty, replicate_quantizers, set_progress

__all__ = [
    "APoTQuantizer",
    "BinaryQuantizer",
    "DSQQuantizer",
    "DoReFaQuantizer",
    "E4M3Quantizer",
    "E5M2Quantizer",
    "EMAQuantizer",
    "LSQPlusQuantizer",
    "LSQQuantizer",
    "LearnedBitsQuantizer",
    "MXFP4Quantizer",
    "MXFP6Quantizer",
    "MXFP8Quantizer",
    "MXINT8Quantizer",
    "MinMaxQuantizer",
    "N2UQQuantizer",
    "PACTQuantizer",
    "PowerOfTwoQuantizer",
    "Quantizer",
    "RangeObserver",
    "StackedSigmoidQuantizer",
    "TTQQuantizer",
    "TernaryQuantizer",
    "as_rows",
    "create_quantizer",
    "parameter_groups",
    "penalty",
    "register_quantizer",
    "registered_quantizers",
    "replicate_quantizers",
    "scale_shape",
    "set_progress",
]
