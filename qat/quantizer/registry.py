"""The registry of rules: names to quantizer classes."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from qat.quantizer.base import CALL_METHODS, Quantizer
from qat.spec import QuantSpec, Role, default_spec
from qat.text import did_you_mean

_QUANTIZERS: dict[str, type[Quantizer]] = {}

QuantizerClass = TypeVar("QuantizerClass", bound=type[Quantizer])


def register_quantizer(name: str) -> Callable[[QuantizerClass], QuantizerClass]:
    """Register a `Quantizer` class as `QuantSpec(rule=name)`, in code and in YAML.

    A name that another class has is a ValueError; a decorator without parentheses, or another class, a TypeError.

    A rule whose values lie on the grid is deployed with `codes(x)` and `grid(x)`, which have to agree with
    `quantize(x)`; one whose values do not sets `exportable = False`. `Quantizer` says what else it may override.

    >>> from qat.functional import fake_quantize
    >>> @register_quantizer("doc_fixed")
    ... class FixedGrid(Quantizer):
    ...     def quantize(self, x):
    ...         scale, zero_point = self.grid()
    ...         return fake_quantize(x, scale, zero_point, self.spec.qmin, self.spec.qmax)
    >>> create_quantizer(QuantSpec(rule="doc_fixed"))
    FixedGrid(doc_fixed, uint8 affine per tensor)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'register_quantizer: write @register_quantizer("name") above the class, got {name!r}')

    def register(cls: QuantizerClass) -> QuantizerClass:
        if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
            raise TypeError(f"register_quantizer({name!r}): expected a subclass of qat.Quantizer, got {cls!r}")
        taken = _QUANTIZERS.get(name, cls)
        # A notebook's cell that runs again defines the class again.
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"register_quantizer({name!r}): the name is taken by {taken.__module__}.{taken.__name__}")
        _QUANTIZERS[name] = cls
        return cls

    return register


def registered_quantizers() -> list[str]:
    """Return the names of all registered rules, sorted."""
    return sorted(_QUANTIZERS)


def quantizer_class(rule: str) -> type[Quantizer]:
    """Return the class registered under this name."""
    if rule not in _QUANTIZERS:
        hint = did_you_mean(rule, _QUANTIZERS) or "import the module of one of your own first (in a config: imports)"
        raise ValueError(f"unknown quantizer {rule!r}; registered: {', '.join(registered_quantizers())}; {hint}")
    return _QUANTIZERS[rule]


def create_quantizer(
    spec: QuantSpec, role: Role = "activation", shape: tuple[int, ...] = (), device: torch.device | str | None = None
) -> Quantizer:
    """Create a quantizer of the spec's rule; arguments as of `Quantizer`.

    An unknown rule is a ValueError.

    >>> create_quantizer(QuantSpec(bits=4), "weight", (8, 1))
    LSQQuantizer(lsq, int4 narrow symmetric per channel)
    """
    spec = spec.resolved(default_spec(role))
    return quantizer_class(spec.rule)(spec, role, shape, device)


def estimator_of(module: object) -> str | None:
    """Return the `estimator` that the class of a quantizer declares, or None.

    A subclass inherits it together with all methods that decide what a call computes, or else declares its own.
    """
    kind = type(module)
    declaring: Any = next((base for base in kind.__mro__ if "estimator" in vars(base)), None)
    # One method overridden, and a kernel would compute something else than the module.
    same = all(getattr(kind, name, None) is getattr(declaring, name, None) for name in CALL_METHODS)
    return declaring.estimator if declaring is not None and same else None
