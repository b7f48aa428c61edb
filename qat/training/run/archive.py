"""States of models: files of torch.save, read with a look at their checksums, which torch.load ignores, and loaded."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from qat.training.errors import UserError


class DamagedError(Exception):
    """The content of a file is not what was written; the message is part of a sentence that names the file."""


def read_archive(path: Path) -> Any:
    """Read a file of torch.save onto the CPU, tensors and plain values only; torch.load raises many kinds of errors."""
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


def load_state(model: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Load a state_dict strictly; keys and shapes that differ become one sentence that begins with `where`."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        differences = shorten(str(error).partition("\n")[2] or str(error), 300, placeholder=" ...")
        raise UserError(f"{where}: {differences}") from error
