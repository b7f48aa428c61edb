"""Aids of fine-tuning at few bits: small classes and functions for any loop."""

from qat.finetuning.accumulation import grouped
from qat.finetuning.distillation import Distillation
from qat.finetuning.ema import EMA
from qat.finetuning.gradual import GradualQuantization
from qat.finetuning.oscillation import Oscillations

__all__ = ["EMA", "Distillation", "GradualQuantization", "Oscillations", "grouped"]
