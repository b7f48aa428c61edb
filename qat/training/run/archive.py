"""Files of tensors with checksums: a damaged file is refused.

torch.load ignores the checksums in the archives of torch.save, and safetensors has none, so a flipped byte would become
a weight. Here the checksums of archives are compared, and each safetensors file gets a digest. Files of torch before
1.6 and safetensors of other programs have neither; they are read without a check.
"""

import hashlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DIGEST = "sha256"
"""The key of the digest in a safetensors file's metadata."""

FOLDER = 0x10
"""The attribute of a folder. For a member of an archive that has it, torch leaves the tensor uninitialised."""

CHUNK = 2**20
"""Bytes per read."""


class DamagedError(Exception):
    """The content of a file is not what was written; the message is part of a sentence that names the file."""


def read_archive(path: Path) -> Any:
    """Read a file of torch.save onto the CPU, with tensors and plain values only.

    Raises:
        DamagedError: if a checksum is wrong.
        OSError: if the file cannot be read.
        Exception: of almost any type, from torch.load, if torch.save did not write the file.
    """
    _check_archive(path)
    with open(path, "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def _check_archive(path: Path) -> None:
    """Compare the checksums of an archive with its content; a file that is not an archive passes."""
    if not zipfile.is_zipfile(path):
        open(path, "rb").close()  # raises if the file cannot be read; is_zipfile returns False then
        return
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = [member.filename for member in archive.infolist() if not _is_whole(archive, member)]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # from a damaged header
        raise DamagedError(f"its archive is broken: {error}") from error
    if wrong:
        raise DamagedError(f"the checksum of {wrong[0]} is wrong")


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors with a digest of their names, types, shapes and bytes in the file's metadata.

    The tensors are contiguous and on the CPU, and none is a view of another.
    """
    save_file(tensors, path, metadata={"format": "pt", DIGEST: _digest(tensors)})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; if `write_safetensors` wrote it, its digest is checked.

    Raises:
        DamagedError: if the digest is wrong.
        SafetensorError: if it is not a safetensors file.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    if DIGEST in metadata and metadata[DIGEST] != _digest(tensors):
        raise DamagedError("its tensors are not those that were written")
    return tensors


def _is_whole(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Compare checksum and length; zipfile checks neither if a flipped length makes the member look empty."""
    checksum, length = 0, 0
    try:
        with archive.open(member) as content:
            while chunk := content.read(CHUNK):
                checksum, length = zlib.crc32(chunk, checksum), length + len(chunk)
    except (zipfile.BadZipFile, EOFError):
        return False
    whole = member.compress_type != zipfile.ZIP_STORED or member.compress_size == member.file_size
    return whole and not member.external_attr & FOLDER and (checksum, length) == (member.CRC, member.file_size)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
