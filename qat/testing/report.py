"""What `ste_gradcheck` hands back: one result a check, and all failures in one error."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONGEST_DETAIL = 300


class GradcheckError(AssertionError):
    """An estimator does not do what it declares; the text has one line for each failed check."""


class Skipped(Exception):  # noqa: N818 - a reason, not an error
    """A check does not apply; the text says why."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: the check, one of `qat.testing.CHECKS`.
        passed: false if it failed; a skipped check counts as passed.
        detail: what was checked, why it failed (with the first offending element), or why it was skipped.
        skipped: whether it was skipped.
        error: the exception that the estimator raised, if any, with its traceback.
    """

    name: str
    passed: bool
    detail: str
    skipped: bool = False
    error: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def status(self) -> str:
        """ok, FAILED or skipped."""
        return "FAILED" if not self.passed else "skipped" if self.skipped else "ok"


@dataclass(frozen=True)
class GradcheckReport:
    """The results of all checks; `str()` is a table.

    Attributes:
        name: the name of the function.
        results: in the order in which the checks ran.

    >>> print(GradcheckReport("round_ste", (CheckResult("gradient", True, "1 slot at 7 values of x"),)))
    round_ste: 1 check, 0 failed
      gradient  ok  1 slot at 7 values of x
    """

    name: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if not result.passed)

    def __getitem__(self, name: str) -> CheckResult:
        """The result of the check with this name."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)

    def __str__(self) -> str:
        """A table: check, status, detail."""
        names = max((len(result.name) for result in self.results), default=0)
        states = max((len(result.status) for result in self.results), default=0)
        rows = [f"  {each.name:<{names}}  {each.status:<{states}}  {each.detail}" for each in self.results]
        return "\n".join([f"{self.name}: {plural(len(rows), 'check')}, {len(self.failures)} failed", *rows])

    def raise_failures(self) -> None:
        """Raise if a check failed, with one line for each.

        Raises:
            GradcheckError: if a check failed.
        """
        if self.failures:
            count = f"{len(self.failures)} of {plural(len(self.results), 'check')} failed for {self.name}"
            raise GradcheckError("\n".join([count, *(f"  {each.name}: {each.detail}" for each in self.failures)]))


def plural(count: int, noun: str) -> str:
    """'1 slot', '2 slots'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_line(error: Exception) -> str:
    """An exception in one line: its type and the first line of its text, and the next if that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_DETAIL else f"{line[:LONGEST_DETAIL]}..."


@contextmanager
def raising(words: str) -> Iterator[None]:
    """Turn an exception raised inside into a failure that names the case; a failure passes unchanged.

    Raises:
        GradcheckError: if anything is raised inside.
    """
    try:
        yield
    except (GradcheckError, Skipped):
        raise
    except Exception as error:
        raise GradcheckError(f"{words}raised {first_line(error)}") from error
