"""Checkpoints: written atomically, read without unpickling code, and resumed only by the run that they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from qat.quantizer import Quantizer
from qat.quantizer.base import SWITCHES
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run.archive import DamagedError, read_archive, write_safetensors
from qat.training.run.files import replacing

FORMAT = 1
"""Version of the payload; `load_checkpoint` refuses others."""

FOREIGN = "the checkpoint is damaged or of another program"

PAYLOAD_KEYS = ("stage", "epochs", "model", "state", "results", "config")

OPTIONAL_KEYS = ("evaluation", "statistics", "about")
"""Keys that checkpoints of earlier versions lack."""

FREE_KEYS = (
    "name", "run_dir", "resume", "device", "log_every", "export", "channels_last", "compile", "cuda_graphs",
    "integer_forward", "data.root", "data.workers", "data.download", "data.eval_batch_size",
)  # fmt: skip
"""Keys of the config that may differ when a run is resumed, because they do not change what is trained: they say where
and how fast. What lies in data.root is compared by `check_same_data`."""

EPOCHS = "qat.epochs"
"""This key may grow when a run is resumed: the run then trains on."""


@dataclass
class StageState:
    """The state of a training stage, without the state of the model; a checkpoint holds its `vars`.

    Args:
        epoch: number of finished epochs.
        best_top1: best validation accuracy so far, in percent.
        optimizer, schedule, scaler, ema: state_dicts; ema is None without averaging.
        rng: states of torch's generators, see `capture_rng`.
        aids: state_dicts of the aids that have one, by name; checkpoints of earlier versions have none.
    """

    epoch: int
    best_top1: float
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Tensor] | None
    rng: dict[str, Tensor]
    aids: dict[str, Any] = field(default_factory=dict)


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators on the CPU and, for a CUDA device, on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states of torch's generators; a CUDA state is only used on a CUDA device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint atomically: whenever the process ends, `path` is the old checkpoint or the new one.

    The payload has tensors and plain Python values under `PAYLOAD_KEYS`: stage (name), epochs (finished ones), model
    (state_dict), state (the `vars` of a `StageState`, or None if a run cannot resume from it), results and config
    (plain dicts). A `format` version is added. Of `OPTIONAL_KEYS` it may have evaluation (top1 in percent and loss of
    the weights as evaluated), statistics (BatchNorm's, of averaged weights, see `copied_statistics`) and about (see
    `about_model`).

    Raises:
        UserError: if the file cannot be written.
    """
    assert tuple(key for key in payload if key not in OPTIONAL_KEYS) == PAYLOAD_KEYS, (
        f"checkpoint payload has the keys {list(payload)}"
    )
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save({"format": FORMAT, **payload}, file)


def load_checkpoint(
    path: Path, way_out: str = "restore a copy of it, or start anew in another run_dir"
) -> dict[str, Any]:
    """Read a file of `save_checkpoint` onto the CPU, with tensors and plain values only.

    The sentence for a file that is no whole checkpoint ends with the way out.

    Raises:
        UserError: if the file is missing or damaged, or from another program or version.
    """
    try:
        payload = read_archive(path)
    except DamagedError as error:
        raise UserError(f"{path}: the checkpoint is damaged ({error}); {way_out}") from error
    except OSError as error:
        if not error.filename:  # for foreign bytes, torch raises errors of many types, OSError among them
            raise UserError(f"{path}: {FOREIGN}; {way_out}") from error
        raise UserError(f"{path}: cannot read the checkpoint ({error.strerror})") from error
    except Exception as error:
        raise UserError(f"{path}: {FOREIGN}; {way_out}") from error
    version = payload.get("format") if isinstance(payload, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{path}: this is no checkpoint of a run (no format version); weights go in model.checkpoint")
    if version != FORMAT:
        raise UserError(f"{path}: the checkpoint has format {version}, this version of qat reads format {FORMAT}")
    missing = [key for key in PAYLOAD_KEYS if key not in payload]
    if missing:
        raise UserError(f"{path}: the checkpoint has no {missing[0]!r}; it is damaged or of another program")
    return dict(payload)


def check_same_config(path: Path, saved: dict[str, Any], config: RunConfig, ahead: tuple[str, ...] = ()) -> None:
    """Refuse to resume if the config differs from `saved`, a JSON dump, with which the checkpoint was trained.

    Only `FREE_KEYS` and the sections in `ahead`, of stages that have not begun, may differ, and `EPOCHS` may grow.

    Raises:
        UserError: with the first key that differs, and both values.
    """
    before, now = dict(_flat(_completed(saved))), dict(_flat(config.model_dump(mode="json")))
    for key in [*now, *(key for key in before if key not in now)]:
        if any(key == free or key.startswith(f"{free}.") for free in (*FREE_KEYS, *ahead)):
            continue
        if key == EPOCHS and key in before and now[key] != before[key]:
            if now[key] > before[key]:
                continue
            raise UserError(
                f"{path}: {EPOCHS}: {now[key]} is fewer than the {before[key]} that it was trained with, and a run can"
                " only grow; set it back, or start anew in another run_dir"
            )
        old, new = (repr(values[key]) if key in values else "not set" for values in (before, now))
        if old != new:
            raise UserError(
                f"{path}: was trained with {key}: {old}, now it is {new}; set it back, or start anew in another run_dir"
            )


def check_same_data(payload: dict[str, Any], classes: list[str], contents: dict[str, Any]) -> list[str]:
    """Compare the data with those of the checkpoint's payload; return a warning for each split that has other images.

    `classes` and `contents` are those of `Data`. Checkpoints of earlier versions did not keep them.

    Raises:
        UserError: if the classes differ.
    """
    before = (payload.get("about") or {}).get("classes", classes)
    if before != classes:
        gone, new = (
            [name for name in some if name not in others] for some, others in ((before, classes), (classes, before))
        )
        named = [f"{what} {', '.join(names[:3])}" for what, names in (("without", gone), ("with", new)) if names]
        raise UserError(
            f"data: {len(classes)} classes, the run was trained with {len(before)}:"
            f" {' and '.join(named) or 'in another order'}; set data.root to its images, or start anew in another"
            " run_dir"
        )
    saved = payload["results"].get("data", contents)
    return [
        f"data: the {split} images are others than before ({saved[split]['images']} then, {now['images']} now);"
        " accuracies before and after do not compare"
        for split, now in contents.items()
        if saved[split] != now
    ]


def restore_model(path: Path, payload: dict[str, Any], model: nn.Module) -> None:
    """Load the state from the payload of the checkpoint at `path`, strictly, into a model built and prepared as then.

    Raises:
        UserError: if the checkpoint is from another model, with the first tensor that differs.
    """
    switches = {f"{name}.{key}" for name, module in model.named_modules(remove_duplicate=False) for key in SWITCHES
                if isinstance(module, Quantizer)}  # fmt: skip
    saved, own = (
        {k: v for k, v in state.items() if k not in switches} for state in (payload["model"], model.state_dict())
    )
    for name in [*own, *(name for name in saved if name not in own)]:
        if name not in saved or name not in own:
            where = "only the model has it" if name in own else "only the checkpoint has it"
            raise UserError(f"{path}: the checkpoint is of another model: {name!r}: {where}")
        there, here = (tuple(state[name].shape) for state in (saved, own))
        if there != here:
            raise UserError(f"{path}: the checkpoint is of another model: {name!r} is {there} there and {here} here")
    model.load_state_dict(payload["model"])


def save_float_weights(path: Path, model: nn.Module) -> None:
    """Write the model's state_dict atomically as safetensors; a shared tensor is written under all of its names.

    Raises:
        UserError: if the file cannot be written.
    """
    # Copies, because safetensors refuses views and shared memory, and simple loaders expect every name.
    tensors = {
        name: torch.clone(tensor.detach().cpu(), memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    with replacing(path) as temporary:
        write_safetensors(temporary, tensors)


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """The saved config with the defaults of keys that were added since; as saved, if it has keys that are gone."""
    try:
        return RunConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys as a user writes them, `a.b[0].c`, with their values; what is empty yields nothing."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                yield from _flat(each, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value
