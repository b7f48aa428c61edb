"""Two processes run the tests, each on one thread: on the same two cores they end in half the time."""

import importlib.util
import logging
import os
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests with two threads would spin on the other's core

if importlib.util.find_spec("triton") is None:  # torch's build for the CPU alone
    collect_ignore = ["qat/kernels/triton"]


@pytest.fixture(autouse=True)
def level_of_messages() -> None:
    """A command run inside a test leaves its level behind; another order of the tests must not change what they see."""
    logging.getLogger("qat").setLevel(logging.NOTSET)
    # pytest 9 listens to loggers that do not propagate, and torch.export would write each of its steps to this one.
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """On which kind of processor the tests ran; they have to pass on both. A header would not show under `-q`."""
    from qat.export.onnxruntime.session import multiplies_exactly
    from qat.kernels.cpu import onednn, processor

    found = (
        f"oneDNN multiplies integers {_word(onednn.is_exact_natively())}, ONNX Runtime's default session"
        f" {_word(multiplies_exactly(with_option=False))}"
    )
    asked = processor.asked_for()
    taken = f"; taken for one of the kind {asked} ({processor.VARIABLE})" if asked else ""
    terminalreporter.write_line(f"processor: {found}{taken}")


def _word(exact: bool) -> str:
    return "exactly" if exact else "in 16 bits"
