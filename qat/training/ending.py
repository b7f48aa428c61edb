"""How the command ends when it does not end well: one sentence on standard error, and the status that a shell expects.

Nothing is lost by any of these ends: last.pt holds the last finished epoch, and resume=auto goes on from it.
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
from typing import Any

import torch

from qat.training.errors import UserError

GOES_ON = "resume=auto goes on from the last finished epoch"

ASKED_TO_END = ("SIGTERM", "SIGHUP")
"""Signals of schedulers and of terminals that close, answered as Ctrl-C is."""


class SignalledError(KeyboardInterrupt):
    """One of `ASKED_TO_END`, on its way through whatever Ctrl-C would go through.

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
        2 for what the user can mend (a config, a disk, memory), 128 plus the signal for what asked the run to end:
        130 for Ctrl-C, 143 for SIGTERM, 141 for a pipe that was closed.
    """
    with _spelled_out(sys.stdout), _spelled_out(sys.stderr), _signals_raised():
        try:
            return _ended(run)
        except SignalledError as error:  # also while another end was being told
            return _said(128 + error.number, f"ended by {signal.Signals(error.number).name}; {GOES_ON}")
        except RuntimeError as error:  # of torch, for a loader process that died while another end was looked at
            sentence = _sentence(error)
            if sentence is None:
                raise
            return _said(2, sentence)


def _ended(run: Callable[[], int]) -> int:
    try:
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it may fail, and not when Python ends
        return status
    except UserError as error:
        return _said(2, *error.problems)
    except SignalledError:
        raise
    except KeyboardInterrupt:
        return _said(130, f"interrupted; {GOES_ON}")
    except BrokenPipeError:
        _forget_output()
        return _said(141, f"standard output was closed; {GOES_ON}")
    except (ConnectionError, EOFError) as error:
        _watch_no_loaders()
        if not _came_over_a_connection(error):
            raise
        return _said(2, _lost_loader(error))
    except OSError as error:
        what = "" if error.filename is None else f"{error.filename}: "
        return _said(2, f"{what}cannot be read or written ({error.strerror or error}); {GOES_ON}")
    except (MemoryError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        return _said(2, sentence)


def _sentence(error: BaseException) -> str | None:
    """What torch says without a type of its own when a loader process dies or memory ends; None for anything else."""
    words = " ".join(str(error).split())
    worker = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited)", words)
    if worker:
        _watch_no_loaders()
        how = f"was killed ({worker[2]})" if worker[2] else "ended"
        return (
            f"data.workers: loader process {worker[1]} {how}, as one does that finds too little memory;"
            f" try fewer of them; {GOES_ON}"
        )
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in words:
        asked = re.search(r"[Tt]ried to allocate (\d+(?:\.\d+)? ?\w+)", words)
        return (
            f"out of memory{f' for {asked[1]} more' if asked else ''}; try a smaller data.batch_size or"
            f" data.image_size; {GOES_ON}"
        )
    return None


def _came_over_a_connection(error: BaseException) -> bool:
    """Whether Python's multiprocessing raised it: where loader processes are read."""
    return any("multiprocessing" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _lost_loader(error: BaseException) -> str:
    """Why a connection ended: a loader process died, of which torch's own sentence would come next."""
    return (
        f"data.workers: the connection to a loader process ended ({error or 'it broke off'}), as it does when one finds"
        f" too little memory; try fewer of them; {GOES_ON}"
    )


def _watch_no_loaders() -> None:
    """torch raises for each loader process that dies, wherever the main thread is then: in Python's own ending too."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _said(status: int, *sentences: str) -> int:
    if sys.stderr is not None:
        try:
            print(*sentences, sep="\n", file=sys.stderr, flush=True)
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
def _signals_raised() -> Iterator[None]:
    """Raise `SignalledError` for the first signal; further ones wait until the run has ended properly."""
    numbers = [getattr(signal, name) for name in ASKED_TO_END if hasattr(signal, name)]
    mine = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup's stay ignored
    if threading.current_thread() is not threading.main_thread():
        mine = []  # only the main thread may
    replaced: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        for each in mine:
            signal.signal(each, signal.SIG_IGN)
        if hasattr(signal, "SIGCHLD"):  # loader processes get the scheduler's signal too; torch would raise for each
            replaced[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise SignalledError(number)

    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
        for number, handler in replaced.items():
            signal.signal(number, handler)
