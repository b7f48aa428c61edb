"""The end of a command: one sentence on standard error, and the exit status that a shell expects."""

import sys
import traceback
from collections.abc import Callable

import torch

from qat.text import first_line
from qat.training.errors import UserError

HOW_TO_RESUME = "resume=auto goes on from the last finished epoch"

EX_SOFTWARE = 70
"""The status for bugs of the program, which are shown with their traceback (sysexits.h)."""


def exit_status(run: Callable[[], int], way_on: str = HOW_TO_RESUME) -> int:
    """Run a program, and turn errors into a sentence and an exit status.

    It is the program's own, 2 for what the user can fix (a config, a disk, memory), 70 for a bug of the program, and
    130 for Ctrl-C. `way_on` is for the interrupted.
    """
    resume = f"; {way_on}" if way_on else ""
    try:
        return run()
    except UserError as error:
        status, message = 2, str(error)
    except KeyboardInterrupt:
        status, message = 130, f"interrupted{resume}"
    except (Exception, SystemExit) as error:  # sys.exit(0) in a user's module does not make the run a success
        if is_memory_shortage(error):
            advice = f"try a smaller data.batch_size or data.image_size, or fewer data.workers{resume}"
            status, message = 2, f"out of memory ({first_line(error)}); {advice}"
        elif isinstance(error, OSError):
            what = "" if error.filename is None else f"{error.filename}: "
            status, message = 2, f"{what}cannot be read or written ({error.strerror or error}){resume}"
        else:
            # Not 1, with which Python itself would end: that is the status of a failed proof.
            status, message = EX_SOFTWARE, "".join(traceback.format_exception(error)).rstrip()
    print(message, file=sys.stderr, flush=True)
    return status


def is_memory_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is short, here or in a loader process; torch has a type for CUDA's alone."""
    words = ("DefaultCPUAllocator", "DataLoader worker (pid")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)
