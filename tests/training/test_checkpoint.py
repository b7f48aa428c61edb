"""Checkpoints and files of weights: full disks, damage, other models and other configs are noticed and do no harm."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from qat.training.config.schema import RunConfig
from qat.training.model import load_weights
from qat.training.run.checkpoint import (
    check_same_data,
    load_checkpoint,
    read_archive,
    restore_model,
    save_checkpoint,
    save_float_weights,
)
from qat.training.run.folder import check_same_config
from tests.runs.tiny_training import user_error


def payload(model: nn.Module, **changes: Any) -> dict[str, Any]:
    return {
        "stage": "qat",
        "epochs": 2,
        "model": model.state_dict(),
        "state": None,
        "results": {"float": {"top1": 97.5}},
        "config": RunConfig().model_dump(mode="json"),
        "evaluation": {"top1": 97.0, "loss": 0.1},
        "statistics": None,
        "about": {"classes": ["a", "b"]},
        **changes,
    }


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond this many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, payload(nn.Linear(3, 2)))
    before = path.read_bytes()
    with full_disk(2**16):
        said = user_error(save_checkpoint, path, payload(nn.Linear(300, 300)))
        assert said == f"{path}: cannot write it (File too large)"
        said = user_error(save_float_weights, path, nn.Linear(300, 300))
        assert said.startswith(f"{path}: cannot write it (")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


FOREIGN = "the checkpoint is damaged or of another program; restore a copy"


@pytest.mark.parametrize(("content", "sentence"), [
    (b"PK\x03\x04garbage", FOREIGN),
    (nn.Linear(1, 1), FOREIGN),
    (nn.Linear(1, 1).state_dict(), "this is not a checkpoint of a run; weights go in model.checkpoint"),
    ({"format": 2}, "the checkpoint has format 2, this version of qat reads format 1"),
])  # fmt: skip
def test_files_that_are_not_checkpoints_are_refused(content: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert user_error(load_checkpoint, path).startswith(f"{path}: {sentence}")


def test_a_truncated_or_flipped_checkpoint_is_damaged(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", nn.Linear(30, 20)
    save_checkpoint(path, payload(model))
    flip_a_bit(path, model.weight.detach())
    said = f"{path}: the checkpoint is damaged (the checksum of archive/data/0 is wrong); restore a copy"
    assert user_error(load_checkpoint, path).startswith(said)
    path.write_bytes(path.read_bytes()[:-100])
    assert user_error(load_checkpoint, path).startswith(f"{path}: {FOREIGN}")


OTHER_MODELS = [
    (nn.Linear(3, 5), ("weight", "[2, 3]", "[5, 3]")),
    (nn.Sequential(nn.Linear(3, 2)), ("Missing key", '"0.weight"')),
]


@pytest.mark.parametrize(("model", "differences"), OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(model: nn.Module, differences: tuple[str, ...]) -> None:
    said = user_error(restore_model, Path("x/last.pt"), payload(nn.Linear(3, 2)), model)
    assert said.startswith("x/last.pt: the checkpoint is of another model: ") and len(said.splitlines()) == 1
    assert all(each in said for each in differences)


def test_keys_that_do_not_change_the_training_may_differ() -> None:
    saved = RunConfig().model_dump(mode="json")
    changed = {"name": "b", "run_dir": "b", "resume": "auto", "device": "cpu", "log_every": 3}
    changed |= {"export": {"onnx": False}, "compile": True, "channels_last": False, "integer_forward": "off"}
    changed |= {"data": {"workers": 2, "download": True, "root": "elsewhere", "eval_batch_size": 7}}
    check_same_config(Path("last.pt"), saved, RunConfig(**changed))


def test_other_data_are_noticed() -> None:
    contents = {"train": {"images": 9, "digest": "a"}, "val": {"images": 3, "digest": "b"}}
    before = {"about": {"classes": ["cat", "dog"]}, "results": {"data": contents}}
    assert check_same_data(before, ["cat", "dog"], contents) == []
    (said,) = check_same_data(before, ["cat", "dog"], contents | {"val": {"images": 3, "digest": "c"}})
    assert said.startswith("data: the val images are others than before (3 then, 3 now); ")
    said = user_error(check_same_data, before, ["dog", "cat"], contents)
    assert said.startswith("data: 2 classes, the run was trained with 2: in another order; set data.root to its images")


@pytest.mark.parametrize(("before", "now", "difference"), [
    ({}, {"seed": 1}, "seed: 0, now it is 1"),
    ({}, {"float": {"epochs": 5}, "qat": {"epochs": 5}}, "float.epochs: 0, now it is 5"),
    ({}, {"model": {"kwargs": {"width": 2}}}, "model.kwargs.width: not set, now it is 2"),
    ({"model": {"kwargs": {"width": 2}}}, {}, "model.kwargs.width: 2, now it is not set"),
])  # fmt: skip
def test_a_checkpoint_of_another_training_is_refused(before: Any, now: Any, difference: str) -> None:
    said = user_error(check_same_config, Path("last.pt"), RunConfig(**before).model_dump(mode="json"), RunConfig(**now))
    assert said == f"last.pt: was trained with {difference}; set it back, or start anew in another run_dir"


def test_a_run_may_grow_and_not_shrink() -> None:
    saved = RunConfig(qat={"epochs": 3}).model_dump(mode="json")
    check_same_config(Path("last.pt"), saved, RunConfig(qat={"epochs": 5}))
    said = user_error(check_same_config, Path("last.pt"), saved, RunConfig(qat={"epochs": 2}))
    assert said.startswith("last.pt: qat.epochs: 2 is fewer than the 3 that it was trained with")


def test_float_weights_load_with_plain_tools(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model.to(memory_format=torch.channels_last)
    save_float_weights(tmp_path / "float.safetensors", model)
    tensors = load_file(tmp_path / "float.safetensors")
    torch.testing.assert_close(tensors, dict(model.state_dict()), rtol=0, atol=0)
    assert [file.name for file in tmp_path.iterdir()] == ["float.safetensors"]


def test_float_weights_with_a_flipped_bit_are_refused(tmp_path: Path) -> None:
    model, path = nn.Linear(4, 4), tmp_path / "float.safetensors"
    save_float_weights(path, model)
    load_weights(nn.Linear(4, 4), str(path), "x")
    flip_a_bit(path, model.weight.detach())
    said = user_error(load_weights, nn.Linear(4, 4), str(path), "x")
    assert "its tensors are not those that were written" in said


def flip_a_bit(path: Path, tensor: torch.Tensor) -> None:
    """Of the values of a tensor in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 5] ^= 4
    path.write_bytes(content)


STATE = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "flags": torch.tensor([True, False]),
}


def test_a_file_with_a_flipped_bit_loads_unchanged_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(STATE, path)
    whole, refused = path.read_bytes(), 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
        try:
            found = read_archive(path)
        except Exception:
            refused += 1
        else:  # the bit is padding, or metadata that is not read
            torch.testing.assert_close(found, STATE, rtol=0, atol=0, msg=f"byte {position}")
    assert refused > len(whole) / 7 / 4
    torch.save(STATE, path, _use_new_zipfile_serialization=False)  # torch before 1.6 has no checksums
    torch.testing.assert_close(read_archive(path), STATE, rtol=0, atol=0)
