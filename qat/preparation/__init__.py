"""From a float model to a quantized one: tracing, fusion with BatchNorm, placement of quantizers."""

from qat.preparation.features import feature_extractor
from qat.preparation.prepared import prepare
from qat.preparation.proof import self_check
from qat.preparation.state import float_state_dict

__all__ = ["feature_extractor", "float_state_dict", "prepare", "self_check"]
