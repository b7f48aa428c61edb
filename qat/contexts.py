"""States for a while: a model in evaluation mode, calls that are recorded, warnings that are not for the user."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

_one_at_a_time = threading.RLock()
"""`warnings.catch_warnings` puts back the filters of the whole process: where two threads cross, the one that leaves
last would leave the other's behind for ever."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode; afterwards every module is in the mode that it was in."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag


P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """A function without the autocast and inference mode around it: they change ranges, files and parameters."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    modes.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


@contextmanager
def first_calls(modules: Iterable[nn.Module]) -> Iterator[dict[Any, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """A context that records the arguments of the first call of every one of these modules."""
    calls: dict[Any, Any] = {}

    def note(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(called, (args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # these take no hooks
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield calls


@contextmanager
def warnings_ignored(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """A context without the warnings of a category whose text begins like this, a regular expression."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield
