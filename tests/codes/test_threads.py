"""What is process-wide, or looks as if it were, with several threads: each finds its own, and nothing stays wrong."""

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.contexts import warnings_ignored
from qat.kernels import float_products, integers_allowed, plain_formulas, plain_wanted
from tests.references.prepared_case import Plain

SWITCHES = {plain_formulas: plain_wanted, float_products: lambda: not integers_allowed()}


def in_thread(work: Callable[[], Any]) -> Any:
    """What the work returns or raises, done in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


@pytest.mark.parametrize("context", SWITCHES)
def test_a_switch_is_that_of_its_thread_and_ends_as_it_began(context: Any) -> None:
    """The first thread leaves while the second is inside: what it finds on leaving was not there when it came."""
    asked, entered, left = SWITCHES[context], threading.Event(), threading.Event()

    def second() -> list[bool]:
        with context():
            entered.set()
            left.wait(60)
            inside = asked()
        return [inside, asked()]

    with ThreadPoolExecutor(1) as pool:
        with context():
            assert asked() and not in_thread(asked)
            with context():
                assert asked()
            assert asked()
            found = pool.submit(second)
            entered.wait(60)
        assert not asked()
        left.set()
        assert found.result(60) == [True, False]
    assert not asked() and not in_thread(asked)


def test_compiled_code_watches_the_switches_of_its_own_thread() -> None:
    x, eager = torch.zeros(()), {"fullgraph": True, "backend": "eager"}
    compiled = torch.compile(lambda x: x + (10 * plain_wanted()) + (100 * integers_allowed()), **eager)

    def both() -> list[float]:
        outside = compiled(x).item()
        with plain_formulas():
            return [outside, compiled(x).item(), compiled(x).item()]

    assert both() == [100, 110, 110] and both() == [100, 110, 110]
    with float_products():
        assert in_thread(both) == [100, 110, 110] and compiled(x).item() == 0
    assert compiled(x).item() == 100


def test_torch_compile_knows_its_functions_after_a_trace() -> None:
    """It notes at its import what Python's own functions are; and tracing, which imports it, replaces `isinstance`."""
    code = (
        "import torch, qat; from torch import nn\n"
        "qat.prepare(nn.Sequential(nn.Linear(3, 3)), example_inputs=torch.ones(2, 3))\n"
        "f = torch.compile(lambda x: x + isinstance(x, torch.Tensor), fullgraph=True, backend='eager')\n"
        "assert f(torch.ones(1)).item() == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def waiting(meanwhile: Callable[[], Any]) -> nn.Module:
    """A model whose forward, while it is traced, lets another thread do something."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        meanwhile()
        return self.second(x + torch.zeros(x.shape[0], x.shape[1]))  # type: ignore[no-any-return]

    return Plain(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def patched() -> list[Any]:
    found = [nn.Module.__call__, nn.Module.__getattr__, torch.backends.mha.get_fastpath_enabled()]
    return [*found, *(getattr(torch, name) for name in ("zeros", "ones", "empty", "rand", "randn"))]


def test_who_trains_while_another_thread_traces_does_not_notice() -> None:
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    compiled = torch.compile(lambda x: x + torch.zeros(3) + torch.ones(2, 3), fullgraph=True, backend="eager")
    seen: list[Any] = []

    def train() -> None:
        loss = other(torch.ones(5, 3) * torch.randn(5, 3)).sum() + compiled(torch.zeros(2, 3)).sum()
        loss.backward()
        with torch.no_grad():
            encoder(torch.zeros(2, 3, 8))
        seen.append((torch.backends.mha.get_fastpath_enabled(), other[0].weight.grad is not None, float(loss)))

    before = patched()
    model = qat.prepare(waiting(lambda: in_thread(train)), example_inputs=torch.randn(2, 4))
    assert len(seen) > 1 and all(fast and learned for fast, learned, _ in seen)
    assert {"first", "second"} <= dict(model.named_modules()).keys() and patched() == before


def test_models_that_are_prepared_at_once_are_what_they_are_alone() -> None:
    inside, before, x = threading.Event(), patched(), torch.randn(2, 4)

    def prepared(meanwhile: Callable[[], Any]) -> list[str]:
        return [name for name, _ in qat.prepare(waiting(meanwhile), example_inputs=x).named_modules()]

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: inside.wait(60) and prepared(lambda: None))
        mine = prepared(lambda: inside.set() or wait([other], 0.5))
        assert mine == other.result(60) == prepared(lambda: None) and patched() == before


def test_warnings_that_threads_ignore_at_once_are_heard_again() -> None:
    before = list(warnings.filters)

    def second() -> None:
        with warnings_ignored():
            pass

    with ThreadPoolExecutor(1) as pool:
        with warnings_ignored("nobody says this"):
            found = pool.submit(second)
            assert wait([found], 0.5).not_done  # it waits
        found.result(60)
    assert list(warnings.filters) == before
