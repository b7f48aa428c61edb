"""A file of tensors is read exactly as it was written, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qat.training.run.archive import DamagedError, check_archive, read_archive, read_safetensors, write_safetensors

STATE = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "flags": torch.tensor([True, False]),
}


def write_archive(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, path)


def same(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and list(found) == list(STATE)
        and all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in STATE.items())
    )


@pytest.mark.parametrize(
    ("write", "read"), [(write_archive, read_archive), (write_safetensors, read_safetensors)], ids=["pt", "safetensors"]
)
def test_a_file_with_a_flipped_byte_loads_unchanged_or_not_at_all(
    tmp_path: Path, write: Callable[[Path, dict[str, torch.Tensor]], None], read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "x"
    write(path, STATE)
    whole = path.read_bytes()
    assert same({name: read(path)[name] for name in STATE})
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = read(path)
        except Exception:
            refused += 1
        else:  # the byte is padding, or metadata that is not read
            assert same({name: found[name] for name in STATE}), f"byte {position} of {len(whole)}"
    assert refused > len(whole) / 4


def test_a_flipped_weight_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(STATE, path)
    content = bytearray(path.read_bytes())
    content[content.index(STATE["weight"].numpy().tobytes()) + 5] ^= 4
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["weight"].shape == (3, 4)  # torch does not check
    for read in (read_archive, check_archive):
        with pytest.raises(DamagedError, match=r"^the checksum of x/data/0 is wrong$"):
            read(path)
    write_safetensors(path, STATE)
    content = bytearray(path.read_bytes())
    content[content.index(STATE["weight"].numpy().tobytes()) + 5] ^= 4
    path.write_bytes(content)
    assert load_file(path)["weight"].shape == (3, 4)
    with pytest.raises(DamagedError, match=r"^its tensors are not those that were written$"):
        read_safetensors(path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(read_archive(tmp_path / "old.pt"))
    save_file(STATE, tmp_path / "x.safetensors")
    assert same({name: read_safetensors(tmp_path / "x.safetensors")[name] for name in STATE})
    with pytest.raises(FileNotFoundError):
        check_archive(tmp_path / "none.pt")
