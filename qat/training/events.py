"""TensorBoard's event files, written here and now.

torch's SummaryWriter writes in a thread of its own, in which a full disk or a deleted folder ends as a traceback on
standard error, and opens the file anew for each flush. These are the same records of the same form, through one open
file, and what goes wrong is raised where the point is drawn.
"""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from qat.training.errors import UserError

FLUSH_SECONDS = 10
"""How long a point may wait before TensorBoard can see it."""


class EventFile:
    """A new event file of scalars.

    Args:
        folder: an existing folder.
        purge_step: TensorBoard hides the points of the folder's earlier files from this step on.

    Raises:
        UserError: here and in each method, if the file cannot be written.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / name
        try:
            self._file = open(self.path, "xb")  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise self._trouble(error) from error
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self.flush()

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point; it is on the disk within `FLUSH_SECONDS` of the next one."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make all points visible now."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._trouble(error) from error
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left and close the file, also where the former fails."""
        try:
            self._file.close()
        except OSError as error:
            raise self._trouble(error) from error

    def _write(self, event: Event) -> None:
        try:
            self._records.write(event.SerializeToString())
        except OSError as error:
            raise self._trouble(error) from error

    def _trouble(self, error: OSError) -> UserError:
        return UserError(f"{self.path.parent}: cannot write the curves ({error.strerror})")
