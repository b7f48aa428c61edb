"""Which quantizers kernels stand in for, and why not the others."""

from qat.quantizer import Quantizer
from qat.quantizer.base import estimator_of


def codes_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer's output cannot be held as codes; None if it can: the rule `lsq`, one scale, at most 8 bits."""
    spec = quantizer.spec
    if spec.granularity != "tensor":
        return f"it has a scale per {spec.granularity}, and codes have one"
    return rule_refusal(quantizer)


def rule_refusal(quantizer: Quantizer) -> str | None:
    """Why kernels do not compute a quantizer's rule; None if they do."""
    spec = quantizer.spec
    if estimator_of(quantizer) != "lsq":
        return f"kernels compute the rule 'lsq', and {type(quantizer).__name__} computes something else"
    if spec.ewgs != "none":
        return f"ewgs={spec.ewgs!r} corrects its gradient, which kernels do not"
    return f"it has {spec.bits} bits, and a code has 8" if spec.bits > 8 else None


def mode_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer does not quantize as in training; None if it does."""
    if not quantizer.training:
        return "it is in evaluation"
    if quantizer.observer is not None:
        return "it observes a range"
    if quantizer.is_disabled:
        return "it is switched off"
    return None if quantizer.is_calibrated else "it is not calibrated"
