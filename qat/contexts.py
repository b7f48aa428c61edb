"""Contexts: a model in evaluation mode, recorded calls, ignored warnings."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from qat.inputs import Arguments

# `warnings.catch_warnings` restores the filters of the whole process: of two threads that cross, the one that leaves
# last would leave the other's filters behind for ever.
_one_at_a_time = threading.RLock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards restore every module's mode."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:  # not train(flag), which would set children too
            module.training = flag


P = ParamSpec("P")
R = TypeVar("R")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run without the autocast and inference mode of its caller."""
    # They would change ranges, files and parameters.

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
def first_calls(modules: Iterable[nn.Module]) -> Iterator[dict[Any, Arguments]]:
    """Record the arguments of the first call of each of these modules."""
    calls: dict[Any, Arguments] = {}

    def note(called: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls.setdefault(called, (args, kwargs))  # later calls are ignored

    with ExitStack() as hooks:
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # these take no hooks
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield calls


@contextmanager
def warnings_ignored(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore the warnings of a category whose text begins with a regular expression."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield
