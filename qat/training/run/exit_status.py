"""How the command ends when it does not end well: one sentence on standard error, and the status that a shell expects.

What was trained up to the last finished epoch stands in last.pt, and resume=auto goes on from it.
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
"""Signals of schedulers and of terminals that close, answered as Ctrl-C is."""

EX_SOFTWARE = 70
"""The status of our own mistakes, which keep their traceback (sysexits.h)."""

LOST_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: [\w ]+|exited)")
"""What torch says, in a RuntimeError, when a loader process dies."""


class SignalledError(KeyboardInterrupt):
    """One of `ENDING_SIGNALS`, on its way through whatever Ctrl-C would go through.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_status(run: Callable[[], int]) -> int:
    """Run, and turn what the world around a program does to it into a sentence and a status.

    Args:
        run: the program; its own status comes back if it ends by itself.

    Returns:
        2 for what the user can mend (a config, a disk, memory), 70 for a mistake of the program, and 128 plus the
        signal for what asked the run to end: 130 for Ctrl-C, 143 for SIGTERM, 141 for a pipe that was closed.
    """
    with _spelled_out(sys.stdout), _spelled_out(sys.stderr), _signals_raised() as ignore_signals:
        try:
            status = run()
            if sys.stdout is not None:
                with output_errors_reported():  # here, where it may fail, and not when Python ends
                    sys.stdout.flush()
            return status
        except BaseException as error:
            ignore_signals()  # another one would interrupt the end that is told
            end = _end(error)
            _forget_output()
            return _said(*end)


@contextmanager
def output_errors_reported() -> Iterator[None]:
    """Name standard output where it cannot be written.

    Raises:
        BrokenPipeError: if nobody reads it any more.
        UserError: if it cannot be written for another reason.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: cannot write to it ({error.strerror}); {HOW_TO_RESUME}") from error


def memory_shortage(error: BaseException) -> str | None:
    """The sentence for an error of a machine that is short of memory, in this process or a loader's; None for others.

    torch has no types of its own for most of them, and raises for a dead loader process wherever the main thread is.
    """
    words = " ".join(str(error).split())
    lost = LOST_LOADER.match(words) if isinstance(error, RuntimeError) else None
    if lost or (isinstance(error, ConnectionError | EOFError) and _came_over_a_connection(error)):
        said = lost[0] if lost else words or type(error).__name__
        return (
            f"data.workers: a loader process was lost ({said}), as one is that finds too little memory; try fewer of"
            f" them; {HOW_TO_RESUME}"
        )
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in words:
        asked = re.search(r"[Tt]ried to allocate (\d+(?:\.\d+)? ?\w+)", words)
        return (
            f"out of memory{f' for {asked[1]} more' if asked else ''}; try a smaller data.batch_size or"
            f" data.image_size; {HOW_TO_RESUME}"
        )
    return None


def _end(error: BaseException) -> tuple[int, str]:
    """The status and what is said."""
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
    """Whether Python's multiprocessing raised it: where loader processes are read."""
    return any("multiprocessing" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _said(status: int, words: str) -> int:
    if sys.stderr is not None:
        try:
            print(words, file=sys.stderr, flush=True)
        except OSError:  # nobody reads this any more, either
            _forget_output()
    return status


def _forget_output() -> None:
    """Lead both outputs to nowhere, so that Python does not stumble over what they still hold when it ends."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with suppress(OSError, ValueError):  # a stream of a test, without a number
                os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def _spelled_out(stream: object) -> Iterator[None]:
    """Write what a terminal's encoding lacks (a folder's name) as \\x escapes, instead of failing."""
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
    """Raise `SignalledError` for the first signal, and ignore further ones; yields what ignores the first one too."""
    main = threading.current_thread() is threading.main_thread()  # only it may
    # Only signals with the default handler: under nohup, SIGHUP stays ignored.
    mine = [each for each in ENDING_SIGNALS if main and signal.getsignal(each) is signal.SIG_DFL]

    def answer(handler: signal.Handlers) -> None:
        for each in mine:
            signal.signal(each, handler)
        if main and hasattr(signal, "SIGCHLD"):  # torch raises for each loader process that dies
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
