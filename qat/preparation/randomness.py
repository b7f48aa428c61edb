"""Random numbers while a model is traced: the user's go on afterwards as if nothing had been drawn."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.fx.proxy import TraceError
from torch.utils._python_dispatch import TorchDispatchMode

from qat.preparation.patching import tracing_alone


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context with random numbers of its own: torch's, Python's and numpy's; for one thread at a time."""
    # Seeding a device that is not in use yet would outlast the context.
    cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with tracing_alone(), torch.random.fork_rng(devices=cards):
        python, arrays = random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        if cards:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def python_state() -> bytes:
    """What Python's and numpy's next random numbers follow from."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which torch draws no random numbers, in this thread: a graph would keep them as a constant.

    Args:
        looks_away: whether to let an operation pass.
    """

    def __init__(self, looks_away: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._looks_away = looks_away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it draws.

        Raises:
            TraceError: if it does.
        """
        if torch.Tag.nondeterministic_seeded in func.tags and not self._looks_away():
            name = func.overloadpacket.__name__
            raise TraceError(f"forward draws random numbers ({name}), which a graph would not draw anew at every call")
        return func(*args, **(kwargs or {}))
