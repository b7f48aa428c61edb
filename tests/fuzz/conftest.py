"""The self-check is off: it would hide errors of the engine, which the fuzzer looks for."""

import pytest


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
