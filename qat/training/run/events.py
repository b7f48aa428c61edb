"""TensorBoard's event files, written synchronously.

torch's SummaryWriter writes in its own thread, where a full disk or a deleted folder ends in a traceback on standard
error, and reopens the file for each flush. This module writes the same records through one open file: each is visible
at once, and errors are raised where the point is added.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qat.training.errors import UserError

PREFIX = "events.out.tfevents."
"""How TensorBoard's files are named."""


class EventFile:
    """A new event file of scalars in an existing folder; points of earlier files are hidden from `purge_step` on.

    Raises:
        UserError: here and in each method, if the file cannot be written.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        name = f"{PREFIX}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        with self._errors_reported():
            self._file = open(folder / name, "xb")  # noqa: SIM115  (closed by `close`)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            from tensorboard.compat.proto.event_pb2 import SessionLog  # late, since TensorBoard takes time

            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def close(self) -> None:
        """Close the file, even if the last point could not be written."""
        with self._errors_reported():
            self._file.close()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._errors_reported():
            RecordWriter(self._file).write(Event(wall_time=time.time(), **content).SerializeToString())
            self._file.flush()

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder}: cannot write the curves ({error.strerror})") from error
