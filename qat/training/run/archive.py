"""Files of tensors, read only if every byte is what was written, where the file can tell.

Files of torch before 1.6 and safetensors of other programs cannot, and are read as they are.

torch.load does not look at the checksums of the archive that torch.save writes, and safetensors has none: a flipped
byte would be a weight. Here the first are checked, and a digest of its own goes into each safetensors file.
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
"""Key of the digest in a safetensors file's metadata."""

FOLDER = 0x10
"""The attribute under which torch takes a member of an archive for a folder, and leaves its tensor uninitialised."""

CHUNK = 2**20
"""Bytes that are read at a time."""


class DamagedError(Exception):
    """A file does not hold what was written; the words end a sentence that names the file."""


def read_archive(path: Path) -> Any:
    """Read onto the CPU what torch.save wrote, tensors and plain values only.

    Args:
        path: the file. Files of torch before 1.6 are no archives and have no checksums; they are read as they are.

    Raises:
        DamagedError: if a checksum is wrong.
        OSError: if the file cannot be read.
        Exception: of nearly any type, from torch.load, if torch.save did not write it.
    """
    check_archive(path)
    with open(path, "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def check_archive(path: Path) -> None:
    """Compare the checksums of an archive with its content; a file that is no archive has none.

    Raises:
        DamagedError: if one is wrong.
        OSError: if the file cannot be read.
    """
    if not zipfile.is_zipfile(path):
        open(path, "rb").close()  # is_zipfile says no to what cannot be read, too
        return
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = [member.filename for member in archive.infolist() if not _is_whole(archive, member)]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # of a damaged header
        raise DamagedError(f"its archive is broken: {error}") from error
    if wrong:
        raise DamagedError(f"the checksum of {wrong[0]} is wrong")


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors with a digest of their names, types, shapes and bytes in the file's metadata.

    Args:
        path: the file; it is replaced if it exists.
        tensors: contiguous, on the CPU, none a view of another.
    """
    save_file(tensors, path, metadata={"format": "pt", DIGEST: _digest(tensors)})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; one with a digest of `write_safetensors` must still have it.

    Raises:
        DamagedError: if it has another.
        SafetensorError: if it is no safetensors file.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    if DIGEST in metadata and metadata[DIGEST] != _digest(tensors):
        raise DamagedError("its tensors are not those that were written")
    return tensors


def _is_whole(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Compare checksum and length; zipfile itself looks at neither where a flipped length says that nothing is left."""
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
