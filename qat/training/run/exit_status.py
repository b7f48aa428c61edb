"""End of a command: a sentence on standard error, and the exit status."""

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from qat.text import first_line, printable
from qat.training.errors import UserError
from qat.training.ranks import is_first_to_fail

HOW_TO_RESUME = "resume=auto goes on from the last checkpoint"

# Sent by schedulers and closing terminals. They end a run like Ctrl-C, but in training only after a checkpoint.
ENDING_SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGUSR1", "SIGHUP")]
_deferred: list[list[int]] = []  # one list for each active `signals_deferred`
EX_SOFTWARE = 70  # sysexits.h: a bug of the program, shown with its traceback


class SignalledError(KeyboardInterrupt):
    """One of `ENDING_SIGNALS`, raised to unwind the program as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_status(run: Callable[[], int], way_on: str = HOW_TO_RESUME) -> int:
    """Run a program, and turn errors and signals into a sentence and a status.

    The status is the program's own if it returns, 2 for what the user can fix (a config, a disk, memory), 70 for a bug
    of the program, and 128 plus the signal if the run was asked to end: 130 for Ctrl-C, 143 for SIGTERM, 138 for
    SIGUSR1. `way_on` ends the sentence of an interrupted run. Of many ranks, only the first that fails prints.
    """
    resume = f"; {way_on}" if way_on else ""
    try:
        with _signals_raised():
            return run()
    except UserError as error:
        status, message = 2, str(error)
    except SignalledError as error:
        status, message = 128 + error.number, f"ended by {signal.Signals(error.number).name}{resume}"
    except KeyboardInterrupt:
        status, message = 130, f"interrupted{resume}"
    except (Exception, SystemExit) as error:  # sys.exit(0) in a user's module does not make the run a success
        if is_memory_shortage(error):
            advice = f"try a smaller data.batch_size or data.image_size, or fewer data.workers{resume}"
            status, message = 2, f"out of memory ({first_line(error)}); {advice}"
        elif isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            status, message = 2, f"another rank ended without a word (killed, or short of memory?){resume}"
        elif isinstance(error, OSError):
            what = "" if error.filename is None else f"{error.filename}: "
            status, message = 2, f"{what}cannot be read or written ({error.strerror or error}){resume}"
        else:
            # Not 1, with which Python itself would end: that is the status of a failed proof.
            status, message = EX_SOFTWARE, "".join(traceback.format_exception(error)).rstrip()
    if is_first_to_fail():
        print(printable(message), file=sys.stderr, flush=True)
    return status


def is_memory_shortage(error: BaseException) -> bool:
    words = ("DefaultCPUAllocator", "DataLoader worker (pid")  # torch has an exception type for CUDA only
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)


@contextmanager
def _signals_raised() -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()  # other threads may not set handlers
    # Only signals with the default handler: under nohup, SIGHUP stays ignored.
    mine = [each for each in ENDING_SIGNALS if main and signal.getsignal(each) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        if _deferred:
            _deferred[-1].append(number)
            return
        for each in mine:  # a second signal would interrupt the cleaning up
            signal.signal(each, signal.SIG_IGN)
        raise SignalledError(number)

    for each in mine:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def signals_deferred() -> Iterator[list[int]]:
    """Collect `ENDING_SIGNALS` in the yielded list instead of raising them."""
    _deferred.append([])
    try:
        yield _deferred[-1]
    finally:
        _deferred.pop()
