"""Aids of fine-tuning at few bits: small classes and functions for any loop."""

from qat.finetuning.accumulation import grouped
from qat.finetuning.distillation import Distillation
from qat.finetuning.ema import EMA
from qat.finetuning.oscillation import Oscillations
from qat.finetuning.quant_noise import QuantNoise

__all__ = ["EMA", "Distillation", "Oscillations", "QuantNoise", "grouped"]
