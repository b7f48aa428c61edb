"""Fixtures: this machine as one kind of processor, with the numbers of that kind (`QAT_PROCESSOR`)."""

from collections.abc import Callable, Iterator

import pytest

from qat.kernels.cpu import onednn, processor

CACHES = (onednn._are_exact, onednn.is_exact_natively, onednn._say)


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def untried() -> Iterator[None]:
    """What was found out about the processor is forgotten, before and after."""
    forget()
    yield
    forget()


@pytest.fixture
def as_processor(untried: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[processor.Processor], None]:
    """Take this machine for one of a kind until the test ends."""

    def take(kind: processor.Processor) -> None:
        monkeypatch.setenv(processor.VARIABLE, kind)
        forget()

    return take
