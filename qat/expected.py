"""Arguments that are not what a public function expects, each refused in one sentence."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from qat.text import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self


def expect_model(function: Callable[..., Any], model: Any) -> None:
    """Raise a TypeError if the argument `model` of a public function is no model.

    Args:
        function: it; the sentence has its name and the order of its arguments.
        model: what it was given.

    >>> import qat
    >>> expect_model(qat.summary, nn.Linear(4, 2))
    >>> expect_model(qat.summary, nn.Linear)
    Traceback (most recent call last):
    TypeError: summary: model must be a torch.nn.Module, got the class Linear; make one of it, Linear(...)
    """
    if isinstance(model, nn.Module):
        return
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    kind = type(model).__name__
    if isinstance(model, type):
        kind, way = f"the class {model.__name__}", f"make one of it, {model.__name__}(...)"
    elif isinstance(model, Mapping):
        way = "load a state dict into the model that it is of, model.load_state_dict(...)"
    elif kind == "ExportedProgram":
        way = "torch.export comes after qat.prepare, which takes the float model"
    else:
        way = f"the order is {', '.join(named)}" if len(named) > 1 else "give the model itself"
    raise TypeError(f"{function.__name__}: model must be a torch.nn.Module, got {kind}; {way}")


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


class NamedArguments:
    """Base of classes whose constructor says which argument an unknown one probably stands for."""

    def __new__(cls, *_: Any, **given: Any) -> "Self":
        """Refuse keyword arguments that the constructor does not have, with Python's own kind of error."""
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        problem = "" if takes_any else unknown_name(given, [*parameters][1:], "argument")
        if problem:
            raise TypeError(f"{cls.__name__}: {problem}")
        return super().__new__(cls)
