"""Aids of fine-tuning: what helps few bits to the accuracy of many, each a small class or function for any loop."""

from qat.finetuning.accumulation import grouped
from qat.finetuning.distillation import Distillation

__all__ = ["Distillation", "grouped"]
