"""A run's output: TensorBoard curves, lines and tables on standard output, progress bars on standard error."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from qat.training.errors import UserError
from qat.training.run.exit_status import output_errors_reported

SPARSE_SECONDS = 30.0
"""Seconds between two lines of a progress bar in a file: 120 lines per hour."""


class RunLog:
    """The curves, in an existing run folder, and the text output of one run; a context manager that closes its file.

    Steps are counted over the whole run, so that the curves of a resumed run join (see `resume`).

    Args:
        folder: the run folder.
        anew: hide the curves that an earlier start left in the folder.
    """

    def __init__(self, folder: Path, anew: bool = False) -> None:
        self.folder, self.anew = folder, anew
        self._writer: Any = None

    def __enter__(self) -> "RunLog":
        self._open(0 if self.anew else None)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        hidden = suppress(UserError) if error is not None else nullcontext()  # a second error would hide the first
        with hidden, self._errors_reported():
            self._writer.close()
        self._writer = None

    def resume(self, step: int) -> None:
        """Continue after this step; TensorBoard then hides later points of the interrupted run."""
        with self._errors_reported():
            self._writer.close()
        self._open(step + 1)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to the curve `tag`; TensorBoard groups curves by the part before the first slash."""
        with self._errors_reported():
            self._writer.add_scalar(tag, value, step)
            self._writer.flush()  # a run that is killed goes on from last.pt, and so must its curves

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late, since TensorBoard takes time

        with self._errors_reported():
            self._writer = SummaryWriter(str(self.folder), purge_step=purge_step)

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.folder}: cannot write the curves ({error.strerror})") from error

    def say(self, text: str) -> None:
        """Print text on standard output, above a progress bar if there is one.

        Raises:
            BrokenPipeError: if the reader has closed the pipe.
            UserError: if it cannot be written for another reason.
        """
        if sys.stdout is None:  # closed before the run began (`>&-`)
            return
        with output_errors_reported():
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


def on_terminal() -> bool:
    """Whether standard error is a terminal, where a bar can be drawn."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Lines:
    """Standard error as a file for tqdm: each state of a bar is a line, without carriage returns."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.flush = stream, stream.flush

    def write(self, text: str) -> None:
        if text.strip():
            self.stream.write(f"{text.strip()}\n")


def progress_bar(batches: Iterable[Any], description: str | None) -> "tqdm[Any]":
    """Iterate with a bar on standard error that disappears at the end; a context manager, so that errors clear it too.

    The description is the text before the bar; None for no bar. If standard error is a file, there is one line every 30
    seconds, so that logs stay small.
    """
    terminal = on_terminal()
    return tqdm(
        batches,
        desc=description,
        file=sys.stderr if terminal or sys.stderr is None else _Lines(sys.stderr),
        disable=description is None or sys.stderr is None,
        unit="batch",
        leave=False,
        dynamic_ncols=True,
        delay=0 if terminal else SPARSE_SECONDS,
        mininterval=0.2 if terminal else SPARSE_SECONDS,
        maxinterval=2 * SPARSE_SECONDS,
    )
