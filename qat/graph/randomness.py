"""Random numbers while a model is traced or checked, restored afterwards."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from qat.graph.patches import capturing_alone


@contextmanager
def rewinding() -> Iterator[Callable[[], None]]:
    """Restore the states of torch's, Python's and NumPy's generators at the end.

    The context's value is a function that restores them earlier. A generator that was not used is left alone, since
    another thread may be about to draw from it.
    """
    generators: list[tuple[Callable[[], object], Callable[..., object]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    generators += [
        (partial(torch.cuda.get_rng_state, card), partial(torch.cuda.set_rng_state, device=card)) for card in _cards()
    ]
    states = [(read, write, read()) for read, write in generators]

    def rewind() -> None:
        for read, write, state in states:
            if pickle.dumps(read()) != pickle.dumps(state):  # states hold arrays, which == compares one by one
                write(state)

    try:
        yield rewind
    finally:
        rewind()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start all generators from a seed; one thread at a time."""
    with capturing_alone, rewinding():
        torch.default_generator.manual_seed(seed)
        if _cards():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _cards() -> range:
    # The CUDA devices in use: reading the generator of another would initialize it for good.
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def python_state() -> bytes:
    """Return the states of Python's and NumPy's generators."""
    return pickle.dumps((random.getstate(), np.random.get_state()))
