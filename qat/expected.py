"""Arguments that are not what a public function expects, each refused in one sentence."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from qat.text import did_you_mean


def expect_model(function: Callable[..., Any], model: Any) -> None:
    """Raise a TypeError if the argument `model` of a public function, which it names, is not a model.

    >>> import qat
    >>> expect_model(qat.summary, nn.Linear(4, 2))
    >>> expect_model(qat.summary, nn.Linear)
    Traceback (most recent call last):
    TypeError: summary: model must be a torch.nn.Module, got the class Linear
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function.__name__}: model must be a torch.nn.Module, got {kind}")


def unknown_name(given: Iterable[Any], known: Iterable[str], kind: str = "key") -> str:
    """The end of a sentence about the first name that is not known: the most similar one, or all; "" if all are known.

    Args:
        given: what the user wrote.
        known: the valid names, in the order in which to show them.
        kind: what such a name is.

    >>> unknown_name({"bit": 4}, ["bits", "signed"])
    "unknown key 'bit'; did you mean 'bits'?"
    >>> unknown_name(["bits", "scale"], ["bits", "signed"], "argument")
    "unknown argument 'scale'; valid: bits, signed"
    """
    known = list(known)
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return ""
    hint = did_you_mean(str(wrong), known) or f"valid: {', '.join(known)}"
    return f"unknown {kind} {wrong!r}; {hint}"
