"""A run's output: TensorBoard curves, lines and tables on standard output, progress bars on the terminal."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qat.collectives import rank


class RunLog:
    """The curves and the text of a run; `anew` hides the curves that an earlier start left in the folder.

    Of many ranks, the first writes; it goes on alone at the end.
    """

    def __init__(self, folder: Path, anew: bool = False) -> None:
        self.folder, self._purge_step, self._writes = folder, 0 if anew else None, rank() == 0
        self._writer: Any = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def resume(self, step: int) -> None:
        """Continue after this step, before the first point; TensorBoard hides later points of the interrupted run."""
        self._purge_step = step + 1

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to the curve `tag`; TensorBoard groups curves by the part before the first slash."""
        if not self._writes:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # late, since TensorBoard takes time

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
        self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # a run that is killed goes on from last.pt, and so must its curves

    def say(self, text: str) -> None:
        """Print text on standard output, above a progress bar if there is one."""
        if self._writes:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


def on_terminal() -> bool:
    """Whether standard error is a terminal, where the first rank can draw a bar."""
    return sys.stderr.isatty() and rank() == 0


def progress_bar(batches: Iterable[Any], description: str | None) -> "tqdm[Any]":
    """Iterate with a bar on the terminal, if there is a description; a context manager, so that errors clear it too."""
    hidden = description is None or not on_terminal()  # a log has a line for every epoch
    return tqdm(batches, desc=description, disable=hidden, unit="batch", leave=False, dynamic_ncols=True)
