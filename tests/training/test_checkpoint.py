"""Checkpoints and files of weights: full disks, damage, other models and other configs are noticed and do no harm."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import CPU, user_error
from torch import nn

from qat.training.config.schema import RunConfig
from qat.training.run.archive import DamagedError, read_archive, read_safetensors, write_safetensors
from qat.training.run.checkpoint import (
    StageState,
    capture_rng,
    check_same_config,
    check_same_data,
    load_checkpoint,
    restore_model,
    restore_rng,
    save_checkpoint,
    save_float_weights,
)


def payload(model: nn.Module, **changes: Any) -> dict[str, Any]:
    return {
        "stage": "qat",
        "epochs": 2,
        "model": model.state_dict(),
        "state": None,
        "results": {"float": {"top1": 97.5}},
        "config": RunConfig().model_dump(mode="json"),
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


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rng = capture_rng(CPU)
    state = StageState(2, 97.5, optimizer.state_dict(), {"last_epoch": 3}, {}, {"weight": torch.ones(2)}, rng)
    saved = payload(model, state=vars(state))
    save_checkpoint(tmp_path / "last.pt", saved)
    drawn = torch.rand(3)

    loaded = load_checkpoint(tmp_path / "last.pt")
    same = ("stage", "epochs", "results", "config")
    assert {key: loaded[key] for key in ("format", *same)} == {"format": 1, **{key: saved[key] for key in same}}
    restore_model(tmp_path / "last.pt", loaded, other)
    assert torch.equal(other.weight, model.weight)
    again = StageState(**loaded["state"])
    assert (again.epoch, again.best_top1, again.schedule, again.scaler) == (2, 97.5, {"last_epoch": 3}, {})
    torch.testing.assert_close(again.optimizer, optimizer.state_dict(), rtol=0, atol=0)
    restore_rng(again.rng, CPU)
    assert torch.equal(torch.rand(3), drawn)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


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


def test_a_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "last.pt"
    said = user_error(save_checkpoint, path, payload(nn.Linear(1, 1)))
    assert said == f"{path}: cannot write it (No such file or directory)"
    assert user_error(load_checkpoint, path) == f"{path}: cannot read the checkpoint (No such file or directory)"


WAY_OUT = "restore a copy of it, or start anew in another run_dir"
DAMAGED = f"the checkpoint is damaged or of another program; {WAY_OUT}"
FOREIGN = "this is no checkpoint of a run (no format version); weights go in model.checkpoint"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", DAMAGED),
        (b"hello world\n", DAMAGED),
        (b"PK\x03\x04garbage", DAMAGED),
        (nn.Linear(1, 1), DAMAGED),
        (nn.Linear(1, 1).state_dict(), FOREIGN),
        (torch.zeros(3), FOREIGN),
        ({"format": "pt"}, FOREIGN),
        ({"format": 2}, "the checkpoint has format 2, this version of qat reads format 1"),
        ({"format": 1, "stage": "qat"}, "the checkpoint has no 'epochs'; it is damaged or of another program"),
    ],
)
def test_files_that_are_not_checkpoints_are_refused(content: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert user_error(load_checkpoint, path) == f"{path}: {sentence}"


def test_a_truncated_or_flipped_checkpoint_is_damaged(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", nn.Linear(30, 20)
    save_checkpoint(path, payload(model))
    flip_a_bit(path, model.weight.detach())
    said = f"the checkpoint is damaged (the checksum of archive/data/0 is wrong); {WAY_OUT}"
    assert user_error(load_checkpoint, path) == f"{path}: {said}"
    path.write_bytes(path.read_bytes()[:-100])
    assert user_error(load_checkpoint, path) == f"{path}: {DAMAGED}"


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (nn.Linear(3, 5), "'weight' is (2, 3) there and (5, 3) here"),
        (nn.Linear(3, 2, bias=False), "'bias': only the checkpoint has it"),
        (nn.Sequential(nn.Linear(3, 2)), "'0.weight': only the model has it"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model: nn.Module, difference: str) -> None:
    said = user_error(restore_model, Path("x/last.pt"), payload(nn.Linear(3, 2)), model)
    assert said == f"x/last.pt: the checkpoint is of another model: {difference}"


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
    assert check_same_data({"results": {}}, ["cat"], contents) == []  # of an earlier version
    (said,) = check_same_data(before, ["cat", "dog"], contents | {"val": {"images": 3, "digest": "c"}})
    assert said.startswith("data: the val images are others than before (3 then, 3 now); ")
    said = user_error(check_same_data, before, ["dog", "cat"], contents)
    assert said.startswith("data: 2 classes, the run was trained with 2: in another order; set data.root to its images")


def test_a_key_that_is_newer_than_the_checkpoint_may_be_left_out() -> None:
    saved = RunConfig().model_dump(mode="json")
    del saved["qat"]["freeze_scales_epoch"]
    check_same_config(Path("last.pt"), saved, RunConfig())
    said = user_error(check_same_config, Path("last.pt"), saved, RunConfig(qat={"freeze_scales_epoch": 1}))
    assert said.startswith("last.pt: was trained with qat.freeze_scales_epoch: None, now it is 1;")


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({}, {"seed": 1}, "seed: 0, now it is 1"),
        ({}, {"qat": {"lr": 0.02}, "seed": 0}, "qat.lr: 0.01, now it is 0.02"),
        ({}, {"float": {"epochs": 5}, "qat": {"epochs": 5}}, "float.epochs: 0, now it is 5"),
        ({}, {"data": {"mean": [0.5, 0.5, 0.25]}}, "data.mean: None, now it is [0.5, 0.5, 0.25]"),
        ({}, {"model": {"kwargs": {"width": 2}}}, "model.kwargs.width: not set, now it is 2"),
        ({"model": {"kwargs": {"width": 2}}}, {}, "model.kwargs.width: 2, now it is not set"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(before: Any, now: Any, difference: str) -> None:
    said = user_error(check_same_config, Path("last.pt"), RunConfig(**before).model_dump(mode="json"), RunConfig(**now))
    assert said == f"last.pt: was trained with {difference}; set it back, or start anew in another run_dir"


def test_a_run_may_grow_and_not_shrink() -> None:
    saved = RunConfig(qat={"epochs": 3}).model_dump(mode="json")
    check_same_config(Path("last.pt"), saved, RunConfig(qat={"epochs": 5}))
    said = user_error(check_same_config, Path("last.pt"), saved, RunConfig(qat={"epochs": 2}))
    assert said == (
        "last.pt: qat.epochs: 2 is fewer than the 3 that it was trained with, and a run can only grow; set it back, or"
        " start anew in another run_dir"
    )


def test_a_key_that_was_added_since_had_its_default() -> None:
    saved = RunConfig(quantization={"overrides": {"conv1": {"weight": {"bits": 4}}}}).model_dump(mode="json")
    now = RunConfig.model_validate(saved)
    del saved["qat"]["bn_reestimate"], saved["quantization"]["overrides"]["conv1"]["weight"]["max_magnitude"]
    check_same_config(Path("last.pt"), saved, now)
    other = now.model_copy(update={"qat": now.qat.model_copy(update={"bn_reestimate": "never"})})
    said = user_error(check_same_config, Path("last.pt"), saved, other)
    assert said.startswith("last.pt: was trained with qat.bn_reestimate: 'auto', now it is 'never'; ")
    saved["qat"]["gone"] = 1
    said = user_error(check_same_config, Path("last.pt"), saved, now)
    assert said.startswith("last.pt: was trained with ") and "not set" in said


def test_float_weights_load_with_plain_tools(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model.to(memory_format=torch.channels_last)
    save_float_weights(tmp_path / "float.safetensors", model)
    tensors = load_file(tmp_path / "float.safetensors")
    torch.testing.assert_close(tensors, dict(model.state_dict()), rtol=0, atol=0)
    assert [file.name for file in tmp_path.iterdir()] == ["float.safetensors"]


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


def flip_a_bit(path: Path, tensor: torch.Tensor) -> None:
    """Of the values of a tensor in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 5] ^= 4
    path.write_bytes(content)


def test_a_flipped_weight_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(STATE, path)
    flip_a_bit(path, STATE["weight"])
    assert torch.load(path, weights_only=True)["weight"].shape == (3, 4)  # torch does not check
    with pytest.raises(DamagedError, match=r"^the checksum of x/data/0 is wrong$"):
        read_archive(path)
    write_safetensors(path, STATE)
    flip_a_bit(path, STATE["weight"])
    assert load_file(path)["weight"].shape == (3, 4)
    with pytest.raises(DamagedError, match=r"^its tensors are not those that were written$"):
        read_safetensors(path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(read_archive(tmp_path / "old.pt"))
    save_file(STATE, tmp_path / "x.safetensors")
    assert same({name: read_safetensors(tmp_path / "x.safetensors")[name] for name in STATE})
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "none.pt")
