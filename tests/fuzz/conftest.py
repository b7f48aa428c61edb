"""The fuzzer looks at the engine itself: a self-check would hide what is wrong with it."""

import pytest


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
