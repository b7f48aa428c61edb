"""Results of `ste_gradcheck`, and comparisons that name the first wrong element."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qat.text import plural

LONGEST_DETAIL = 300  # characters: a compiler's message can take pages


class GradcheckError(AssertionError):
    """Error of an estimator that differs from what it declares, a line a failed check."""


class Skipped(Exception):  # noqa: N818 - a reason, not an error
    """Raised where a check does not apply; the text says why."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    Attributes:
        name: the check, one of `qat.testing.CHECKS`.
        passed: false if it failed; a skipped check counts as passed.
        detail: what was checked, why it failed (with the first offending element), or why it was skipped.
        skipped: True if it was skipped.
        error: the exception that the estimator raised, if any, with its traceback.
    """

    name: str
    passed: bool
    detail: str
    skipped: bool = False
    error: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def status(self) -> str:
        """Return ok, FAILED or skipped."""
        return "FAILED" if not self.passed else "skipped" if self.skipped else "ok"


@dataclass(frozen=True)
class GradcheckReport:
    """Results of all checks of one function, in their order; `str()` is a table.

    >>> print(GradcheckReport("round_ste", (CheckResult("gradient", True, "1 slot at 7 values of x"),)))
    round_ste: 1 check, 0 failed
      gradient  ok  1 slot at 7 values of x
    """

    name: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Checks that failed."""
        return tuple(result for result in self.results if not result.passed)

    def __getitem__(self, name: str) -> CheckResult:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)

    def __str__(self) -> str:
        names = max((len(result.name) for result in self.results), default=0)
        states = max((len(result.status) for result in self.results), default=0)
        rows = [f"  {each.name:<{names}}  {each.status:<{states}}  {each.detail}" for each in self.results]
        return "\n".join([f"{self.name}: {plural(len(rows), 'check')}, {len(self.failures)} failed", *rows])

    def raise_failures(self) -> None:
        """Raise a GradcheckError if a check failed, with one line for each."""
        if self.failures:
            count = f"{len(self.failures)} of {plural(len(self.results), 'check')} failed for {self.name}"
            raise GradcheckError("\n".join([count, *(f"  {each.name}: {each.detail}" for each in self.failures)]))


def first_line(error: Exception) -> str:
    """Return an exception in one line: its type and the first line of its text."""
    # A first line that ends in a colon says nothing without the next.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_DETAIL else f"{line[:LONGEST_DETAIL]}..."


@contextmanager
def raising(words: str) -> Iterator[None]:
    """Turn an exception raised inside into a GradcheckError that names the case."""
    try:
        yield
    except (GradcheckError, Skipped):  # these name their case already
        raise
    except Exception as error:
        raise GradcheckError(f"{words}raised {first_line(error)}") from error


def uneven(like: Tensor, seed: int = 0) -> Tensor:
    """Return float64 values of both signs and of sizes from 0.5 to 2."""
    # Uneven, to reveal sums over wrong axes and lost signs.
    k = torch.arange(1, like.numel() + 1, dtype=torch.float64)
    size = 0.5 + 1.5 * torch.frac(k * 0.6180339887 + seed * 0.3)  # multiples of the golden ratio never repeat
    negative = torch.frac(k * 0.7548776662 + seed * 0.2) < 0.4
    return torch.where(negative, -size, size).reshape(like.shape)


class Wrong(NamedTuple):
    """The first element in which two tensors differ: where, both values, and how many do."""

    at: str
    values: str
    others: str = ""

    def error(self, what: str) -> GradcheckError:
        """Return the error that says so of `what`."""
        return GradcheckError(f"{what}{self.at}: {self.values}{self.others}")


def first_wrong(got: Tensor, expected: Tensor, rtol: float, atol: float, x: Tensor | None = None) -> Wrong | None:
    """Return how two tensors differ, or None if they do not; NaN equals NaN."""
    if got.shape != expected.shape:
        return Wrong("", f"got shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach().double(), expected.detach().double()
    wrong = ~torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    place = f" at {list(index)}" if index else ""
    if x is not None and x.shape == wrong.shape:
        place += f", where x = {number(x[index])}" if place else f" where x = {number(x[index])}"
    others = f"; {int(wrong.sum())} of {wrong.numel()} elements differ" if wrong.numel() > 1 else ""
    return Wrong(place, f"got {number(got[index])}, expected {number(expected[index])}", others)


def number(value: Tensor) -> str:
    """Return the value with up to ten significant digits."""
    return f"{value.item():.10g}"


def index_of(place: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of the element at this place of the flattened tensor."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape))


def largest(x: Tensor | None) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    finite = torch.zeros(0) if x is None else x.detach()[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
