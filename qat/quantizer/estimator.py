"""Which estimator a quantizer computes, so that kernels may compute it in the quantizer's place."""

METHODS = (
    "__call__", "forward", "quantize", "grid", "effective_scale", "positive", "bounds", "gradient_factor", "repair",
    "follow",
)  # fmt: skip
"""What decides the result of a quantizer's call."""


def estimator_of(module: object) -> str | None:
    """The estimator that a quantizer computes; None if its class declares none.

    A rule declares it as the class attribute `estimator`. A subclass inherits it while it inherits every method that
    decides what a call computes; one that overrides such a method has none, unless it declares one itself.

    >>> from qat.quantizer import LSQQuantizer
    >>> class Named(LSQQuantizer):
    ...     def name(self): return "mine"
    >>> class Shifted(LSQQuantizer):
    ...     def quantize(self, x): return super().quantize(x + 1)
    >>> from qat.spec import QuantSpec
    >>> [estimator_of(kind(QuantSpec())) for kind in (LSQQuantizer, Named, Shifted)]
    ['lsq', 'lsq', None]
    """
    kind = type(module)
    declaring = next((base for base in kind.__mro__ if "estimator" in vars(base)), None)
    if declaring is None or any(getattr(kind, name, None) is not getattr(declaring, name, None) for name in METHODS):
        return None
    found: str | None = vars(declaring)["estimator"]
    return found
