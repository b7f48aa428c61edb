"""Checkpoints: full disks, damaged files, other models and other configs are noticed and do no harm."""

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
from qat.training.errors import UserError
from qat.training.run.checkpoint import (
    StageState,
    capture_rng,
    check_same_config,
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
    rng = capture_rng(torch.device("cpu"))
    state = StageState(2, 97.5, optimizer.state_dict(), {"last_epoch": 3}, {}, {"weight": torch.ones(2)}, rng)
    save_checkpoint(tmp_path / "last.pt", payload(model, state=vars(state)))
    drawn = torch.rand(3)

    loaded = load_checkpoint(tmp_path / "last.pt")
    assert {key: loaded[key] for key in ("format", "stage", "epochs", "results", "config")} == {
        "format": 1,
        "stage": "qat",
        "epochs": 2,
        "results": {"float": {"top1": 97.5}},
        "config": RunConfig().model_dump(mode="json"),
    }
    restore_model(tmp_path / "last.pt", loaded, other)
    assert torch.equal(other.weight, model.weight)
    again = StageState(**loaded["state"])
    assert (again.epoch, again.best_top1, again.schedule, again.scaler) == (2, 97.5, {"last_epoch": 3}, {})
    torch.testing.assert_close(again.optimizer, optimizer.state_dict(), rtol=0, atol=0)
    restore_rng(again.rng, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, payload(nn.Linear(3, 2)))
    before = path.read_bytes()
    with full_disk(2**16), pytest.raises(UserError) as raised:
        save_checkpoint(path, payload(nn.Linear(300, 300)))
    assert str(raised.value) == f"{path}: cannot write it (File too large)"
    with full_disk(2**16), pytest.raises(UserError) as raised:
        save_float_weights(path, nn.Linear(300, 300))
    assert str(raised.value).startswith(f"{path}: cannot write it (")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_a_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "last.pt"
    with pytest.raises(UserError) as raised:
        save_checkpoint(path, payload(nn.Linear(1, 1)))
    assert str(raised.value) == f"{path}: cannot write it (No such file or directory)"
    with pytest.raises(UserError) as raised:
        load_checkpoint(path)
    assert str(raised.value) == f"{path}: cannot read the checkpoint (No such file or directory)"


DAMAGED = "the checkpoint is damaged or of another program; remove it to start anew"
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
    with pytest.raises(UserError) as raised:
        load_checkpoint(path)
    assert str(raised.value) == f"{path}: {sentence}"


def test_a_truncated_checkpoint_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, payload(nn.Linear(30, 20)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError) as raised:
        load_checkpoint(path)
    assert str(raised.value) == f"{path}: {DAMAGED}"


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (nn.Linear(3, 5), "'weight' is (2, 3) there and (5, 3) here"),
        (nn.Linear(3, 2, bias=False), "'bias': only the checkpoint has it"),
        (nn.Sequential(nn.Linear(3, 2)), "'0.weight': only the model has it"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model: nn.Module, difference: str) -> None:
    with pytest.raises(UserError) as raised:
        restore_model(Path("x/last.pt"), payload(nn.Linear(3, 2)), model)
    assert str(raised.value) == f"x/last.pt: the checkpoint is of another model: {difference}"


def test_keys_that_do_not_change_the_training_may_differ() -> None:
    saved = RunConfig().model_dump(mode="json")
    changed = {
        "name": "b",
        "run_dir": "b",
        "resume": "auto",
        "device": "cpu",
        "log_every": 3,
        "export": {"onnx": False},
    }
    check_same_config(Path("last.pt"), saved, RunConfig(**changed, data={"workers": 2, "download": True}))


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"seed": 1}, "seed: 0, now it is 1"),
        ({"qat": {"lr": 0.02}, "seed": 0}, "qat.lr: 0.01, now it is 0.02"),
        ({"float": {"epochs": 5}, "qat": {"epochs": 5}}, "float.epochs: 0, now it is 5"),
        ({"data": {"mean": [0.5, 0.5, 0.25]}}, "data.mean: None, now it is [0.5, 0.5, 0.25]"),
        ({"model": {"kwargs": {"width": 2}}}, "model.kwargs.width: not set, now it is 2"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(changed: dict[str, Any], difference: str) -> None:
    with pytest.raises(UserError) as raised:
        check_same_config(Path("last.pt"), RunConfig().model_dump(mode="json"), RunConfig(**changed))
    expected = f"last.pt: was trained with {difference}; set it back, or start anew in another run_dir"
    assert str(raised.value) == expected


def test_a_removed_key_is_a_difference() -> None:
    saved = RunConfig(model={"kwargs": {"width": 2}}).model_dump(mode="json")
    with pytest.raises(UserError, match=r"^last.pt: was trained with model.kwargs.width: 2, now it is not set; "):
        check_same_config(Path("last.pt"), saved, RunConfig())


def test_float_weights_load_with_plain_tools(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model.to(memory_format=torch.channels_last)
    save_float_weights(tmp_path / "float.safetensors", model)
    tensors = load_file(tmp_path / "float.safetensors")
    torch.testing.assert_close(tensors, dict(model.state_dict()), rtol=0, atol=0)
    assert [file.name for file in tmp_path.iterdir()] == ["float.safetensors"]
