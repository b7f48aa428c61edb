"""States for a while: a model in evaluation mode, and warnings that are not for the user."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_one_at_a_time = threading.RLock()
"""`warnings.catch_warnings` puts back the filters of the whole process: where two threads cross, the one that leaves
last would leave the other's behind for ever."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode; afterwards every module is in the mode that it was in.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     [module.training for module in model]
    [False, False]
    >>> [module.training for module in model]
    [True, False]
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def warnings_ignored(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """A context without the warnings of a category whose text begins like this, a regular expression."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield
