"""From a float model to a quantized one: tracing, fusion with BatchNorm, placement of quantizers."""

from qat.preparation.prepared import prepare

__all__ = ["prepare"]
