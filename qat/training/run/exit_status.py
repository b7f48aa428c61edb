"""The end of a command that fails: one sentence on standard error, and the exit status that a shell expects.

The training up to the last finished epoch is in last.pt, from which resume=auto continues.
"""

import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from qat.training.errors import UserError

HOW_TO_RESUME = "resume=auto goes on from the last finished epoch"

ENDING_SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGHUP")]
"""Signals from schedulers and closing terminals; they are handled like Ctrl-C."""

EX_SOFTWARE = 70
"""The status for bugs of the program, which are shown with their traceback (sysexits.h)."""

LOST_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: [\w ]+|exited)")
"""The message of torch's RuntimeError for a loader process that died."""


class SignalledError(KeyboardInterrupt):
    """One of `ENDING_SIGNALS` as an exception; it unwinds the program as Ctrl-C does.

    Args:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_status(run: Callable[[], int], way_on: str = HOW_TO_RESUME) -> int:
    """Run a program, and turn errors and signals into a sentence and an exit status.

    Args:
        run: the program; its own status is returned if it ends normally.
        way_on: what a user does next who was interrupted, or whose disk was full; "" if he only starts it again.

    Returns:
        2 for what the user can fix (a config, a disk, memory), 70 for a bug of the program, and 128 plus the signal if
        the run was asked to end: 130 for Ctrl-C, 143 for SIGTERM, 141 for a closed pipe.
    """
    escaped = _escaping_unknown_characters
    with escaped(sys.stdout), escaped(sys.stderr), _signals_raised() as ignore_signals:
        try:
            status = run()
            if sys.stdout is not None:
                with output_errors_reported():  # flush now, so that an error is reported and not lost at Python's exit
                    sys.stdout.flush()
            return status
        except BaseException as error:
            ignore_signals()  # another signal would interrupt the report
            status, message = _status_and_message(error)
            message = message.replace(HOW_TO_RESUME, way_on).removesuffix("; ")
            _discard_output()
            _print_error(message)
            return status


@contextmanager
def output_errors_reported() -> Iterator[None]:
    """Turn errors of writing to standard output into sentences.

    Raises:
        BrokenPipeError: if the reader has closed the pipe.
        UserError: if it cannot be written for another reason.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: cannot write to it ({error.strerror}); {HOW_TO_RESUME}") from error


def memory_shortage(error: BaseException) -> str | None:
    """Return the sentence for an error caused by a lack of memory, here or in a loader process; None for other errors.

    torch has no exception types for most of these errors. It raises for a dead loader process wherever the main thread
    is at that moment.
    """
    words = " ".join(str(error).split())
    lost = LOST_LOADER.match(words) if isinstance(error, RuntimeError) else None
    if lost or (isinstance(error, ConnectionError | EOFError) and _came_over_a_connection(error)):
        details = lost[0] if lost else words or type(error).__name__
        return (
            f"data.workers: a loader process was lost ({details}), as one is that finds too little memory; try fewer of"
            f" them; {HOW_TO_RESUME}"
        )
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in words:
        asked = re.search(r"[Tt]ried to allocate (\d+(?:\.\d+)? ?\w+)", words)
        return (
            f"out of memory{f' for {asked[1]} more' if asked else ''}; try a smaller data.batch_size or"
            f" data.image_size; {HOW_TO_RESUME}"
        )
    return None


def _status_and_message(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, SignalledError):
        return 128 + error.number, f"ended by {signal.Signals(error.number).name}; {HOW_TO_RESUME}"
    if isinstance(error, KeyboardInterrupt):
        return 130, f"interrupted; {HOW_TO_RESUME}"
    sentence = memory_shortage(error)
    if sentence is not None:
        return 2, sentence
    if isinstance(error, BrokenPipeError):
        return 141, f"standard output was closed; {HOW_TO_RESUME}"
    if isinstance(error, OSError):
        what = "" if error.filename is None else f"{error.filename}: "
        return 2, f"{what}cannot be read or written ({error.strerror or error}); {HOW_TO_RESUME}"
    return EX_SOFTWARE, "".join(traceback.format_exception(error)).rstrip()


def _came_over_a_connection(error: BaseException) -> bool:
    """Whether Python's multiprocessing raised the error, as for the connections to loader processes."""
    return any("multiprocessing" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _print_error(message: str) -> None:
    if sys.stderr is not None:
        try:
            print(message, file=sys.stderr, flush=True)
        except OSError:  # standard error is closed, too
            _discard_output()


def _discard_output() -> None:
    """Redirect outputs that cannot be written to the null device, so that Python's flush at exit does not fail."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with suppress(OSError, ValueError):  # a test's stream may have no file descriptor
                os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def _escaping_unknown_characters(stream: object) -> Iterator[None]:
    """Write characters that the terminal's encoding lacks (in a folder's name) as \\x escapes instead of failing."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError):
            stream.reconfigure(errors=before)


@contextmanager
def _signals_raised() -> Iterator[Callable[[], None]]:
    """Raise `SignalledError` for the first signal, and ignore further ones; yield a function that ignores all."""
    main = threading.current_thread() is threading.main_thread()  # other threads may not set handlers
    # Only signals with the default handler: under nohup, SIGHUP stays ignored.
    mine = [each for each in ENDING_SIGNALS if main and signal.getsignal(each) is signal.SIG_DFL]

    def answer(handler: signal.Handlers) -> None:
        for each in mine:
            signal.signal(each, handler)
        if main and hasattr(signal, "SIGCHLD"):  # torch's handler raises for each loader process that dies
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def ignore() -> None:
        answer(signal.SIG_IGN)

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        raise SignalledError(number)

    for each in mine:
        signal.signal(each, end)
    try:
        yield ignore
    finally:
        answer(signal.SIG_DFL)
