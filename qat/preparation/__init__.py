"""From a float model to a quantized one: tracing, fusion with BatchNorm, placement of quantizers."""

from qat.preparation.prepared import prepare
from qat.preparation.state import float_state_dict

__all__ = ["float_state_dict", "prepare"]
