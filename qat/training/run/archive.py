"""States of models: files of torch.save, read with a look at their checksums, which torch.load ignores, and loaded."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from qat.training.errors import UserError

DIGEST = "sha256"
"""Key of a safetensors file's metadata, a format without checksums: the `state_digest` of what was written."""


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


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU; its digest is checked, if it has one."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        digest = (file.metadata() or {}).get(DIGEST)
    if digest not in (None, state_digest(tensors)):
        raise DamagedError("its tensors are not those that were written")
    return tensors


def state_digest(state: Mapping[str, Tensor]) -> str:
    """A SHA-256 of a state_dict: every name, type, shape and byte. Files of equal digests are of one model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        content = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {content.dtype} {tuple(content.shape)}".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_state(model: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Load a state_dict strictly; keys and shapes that differ become one sentence that begins with `where`."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        differences = shorten(str(error).partition("\n")[2] or str(error), 300, placeholder=" ...")
        raise UserError(f"{where}: {differences}") from error
