"""Files of torch.save, read with a look at their checksums, which torch.load ignores: a flipped bit is no weight."""

import zipfile
from pathlib import Path
from typing import Any

import torch


class DamagedError(Exception):
    """The content of a file is not what was written; the message is part of a sentence that names the file."""


def read_archive(path: Path) -> Any:
    """Read a file of torch.save onto the CPU, with tensors and plain values only.

    Raises:
        DamagedError: if a checksum is wrong.
        OSError: if the file cannot be read.
        Exception: of almost any type, from torch.load, if torch.save did not write the file.
    """
    if zipfile.is_zipfile(path):  # torch before 1.6 wrote no archives
        try:
            with zipfile.ZipFile(path) as archive:
                wrong = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:  # from a damaged header
            raise DamagedError(f"its archive is broken: {error}") from error
        if wrong is not None:
            raise DamagedError(f"the checksum of {wrong} is wrong")
    with open(path, "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)
