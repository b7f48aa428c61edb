"""Warnings that are not for the user are kept from him, by one thread at a time.

`warnings.catch_warnings` puts back the filters of the whole process: where two threads cross, the one that leaves last
would leave the other's behind for ever.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_one_at_a_time = threading.RLock()


@contextmanager
def warnings_ignored(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """A context without the warnings of a category whose text begins like this, a regular expression."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield
