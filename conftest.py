"""Two processes run the tests, each on one thread: on the same two cores they end in half the time.

Tests that open a default session of ONNX Runtime are noted in `DEFAULT_SESSIONS`: `.ci/run` runs them again as the
other kind of processor, on which such a session answers otherwise.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

DEFAULT_SESSIONS = ".pytest_cache/default_sessions"
"""Names of tests, a line each; the file where a fixture of it opens one."""
FOLDER = "session.model_external_initializers_file_folder_path"

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note the file of a test whose fixtures open a default session."""
    yield from _noting(item, item.nodeid.partition("::")[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note a test that opens a default session."""
    yield from _noting(item, item.nodeid)


def _noting(item: pytest.Item, name: str) -> Iterator[None]:
    import onnxruntime

    onnxruntime.InferenceSession = _sessions()
    before = len(opened)
    yield
    if len(opened) > before:
        (item.config.rootpath / DEFAULT_SESSIONS).parent.mkdir(exist_ok=True)
        with (item.config.rootpath / DEFAULT_SESSIONS).open("a") as noted:
            noted.write(f"{name}\n")


opened: list[None] = []
"""As many as default sessions were opened."""


@cache
def _sessions() -> type:
    """A session as on the processor that is asked for; without VNNI at its worst: sums that may saturate do."""
    import onnx
    import onnxruntime
    from onnx.external_data_helper import load_external_data_for_model

    from qat.export.onnx.saturation import saturation_of
    from qat.export.onnxruntime.session import EXACT_OPTION
    from qat.kernels.cpu.processor import asked_for

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: Any, sess_options: Any = None, *given: Any, **more: Any) -> None:
            options, self.saturates = sess_options or onnxruntime.SessionOptions(), False
            # `open_session`, if that is the caller, does without the option where it can.
            exact = sys._getframe(1).f_locals.get("exact", _has_entry(options, EXACT_OPTION[0]))
            if not exact:
                opened.append(None)
                if asked_for() == "vnni":  # this processor may have none
                    options.add_session_config_entry(*EXACT_OPTION)
                self.saturates = asked_for() == "no-vnni"
            super().__init__(model, options, *given, **more)
            if self.saturates:
                proto = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
                if _has_entry(options, FOLDER):
                    load_external_data_for_model(proto, options.get_session_config_entry(FOLDER))
                self.saturates = any(each.channels for each in saturation_of(proto.graph))

        def run(self, *given: Any, **more: Any) -> Any:
            found = super().run(*given, **more)
            return [-x if x.dtype.kind == "f" else x for x in found] if self.saturates else found

    return Session


def _has_entry(options: Any, key: str) -> bool:
    try:
        return bool(options.get_session_config_entry(key))
    except RuntimeError:
        return False


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
