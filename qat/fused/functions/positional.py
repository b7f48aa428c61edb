"""Functions that get all arguments by position: torch need not sort them into the signature at every call."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Forward = TypeVar("Forward", bound=Callable[..., Any])


class _Given:
    """What `inspect.BoundArguments` is, of arguments that stay as they are."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.kwargs: dict[str, Any] = {}

    def apply_defaults(self) -> None:
        """There are none."""


class _PositionalSignature(inspect.Signature):
    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.parameters):
            return super().bind(*args, **kwargs)
        return _Given(args)


def positional(forward: Forward) -> Forward:
    """Decorator for the forward of a Function with setup_context, under @staticmethod.

    `torch.autograd.Function.apply` asks for the signature of such a forward and binds the arguments to it, at every
    call: three quarters of the time that a call with ten arguments takes. A model of 50 layers calls 120 times a step.

    >>> @positional
    ... def forward(x, y): ...
    >>> inspect.signature(forward)
    <_PositionalSignature (x, y)>
    """
    found = inspect.signature(forward)
    forward.__signature__ = _PositionalSignature(  # type: ignore[attr-defined]
        list(found.parameters.values()), return_annotation=found.return_annotation
    )
    return forward
