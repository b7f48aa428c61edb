"""Checkpoints and float weights: atomic, without unpickled code, with checksums."""

import hashlib
import random
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qat
from qat.batch_norm import restore_statistics
from qat.collectives import rank
from qat.finetuning import EMA
from qat.training.config.schema import RunConfig
from qat.training.data.transforms import Preprocessing
from qat.training.errors import UserError
from qat.training.run.folder import Json, State, replacing
from qat.training.tasks.known import score_of

FORMAT = 1  # version of the payload; `load_checkpoint` refuses others
PACKAGES = ("torch", "torchvision", "onnx", "onnxruntime")  # the packages whose versions are kept
PAYLOAD_KEYS = ("stage", "epochs", "model", "state", "results", "config", "evaluation", "statistics", "about")


@dataclass
class StageState:
    """State of a stage besides the model's, after whole epochs and some steps."""

    epoch: int  # whole epochs
    step: int  # steps of the next one
    meters: list[State]  # sums of that epoch, and of the steps since the last point
    best_score: float
    optimizer: State
    schedule: State
    scaler: State
    ema: dict[str, Tensor] | None
    rng: list[State]  # the generators of each rank
    aids: State = field(default_factory=dict)
    watch: State = field(default_factory=dict)


def capture_rng(device: torch.device) -> State:
    """Return the states of the generators of Python, NumPy and torch (CPU, CUDA)."""
    known: Any = np.random.get_state()
    _, keys, *rest = known
    states = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": (keys.tolist(), *rest)}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: State, device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys, *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def save_checkpoint(path: Path, payload: State) -> None:
    """On rank 0, write a checkpoint atomically, with the version of its format.

    The payload has tensors and plain Python values under `PAYLOAD_KEYS`. epochs: finished ones; state: the `vars` of a
    `StageState`, or None if a run cannot resume from it; evaluation: of the weights as evaluated, None within an
    epoch; statistics: BatchNorm's for averaged weights (`copied_statistics`), or None; about: see `about_model`.
    """
    assert tuple(payload) == PAYLOAD_KEYS, f"checkpoint payload has the keys {list(payload)}"
    if rank():
        return
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save({"format": FORMAT, **payload}, file)


RESTORE = "restore a copy of it, or start anew in another run_dir"


def load_checkpoint(path: Path, way_out: str = RESTORE) -> State:
    """Read a checkpoint onto the CPU; `way_out` ends the sentence of a damaged one."""
    try:
        payload = read_archive(path)
    except DamagedError as error:
        raise UserError(f"{path}: the checkpoint is damaged ({error}); {way_out}") from error
    except Exception as error:  # for foreign bytes, torch raises errors of many types, OSError among them
        if isinstance(error, OSError) and error.filename:
            raise UserError(f"{path}: cannot read the checkpoint ({error.strerror})") from error
        raise UserError(f"{path}: the checkpoint is damaged or of another program; {way_out}") from error
    if not isinstance(payload, dict) or payload.get("format") is None:
        raise UserError(f"{path}: this is not a checkpoint of a run; weights go in model.checkpoint")
    if (found := payload["format"]) != FORMAT or not {*PAYLOAD_KEYS} <= payload.keys():
        raise UserError(f"{path}: the checkpoint has format {found!r}, this version of qat reads format {FORMAT}")
    return payload


def check_same_data(payload: State, classes: list[str], contents: Json) -> list[str]:
    """Return a warning for each split with other images; refuse other classes."""
    before, saved = payload["about"]["classes"], payload["results"]["data"]
    if before != classes:
        gone, new = sorted({*before} - {*classes}), sorted({*classes} - {*before})
        named = [f"{what} {', '.join(names[:3])}" for what, names in (("without", gone), ("with", new)) if names]
        what = f"{len(classes)} classes, the run was trained with {len(before)}"
        way = "set data.root to its images, or start anew in another run_dir"
        raise UserError(f"data: {what}: {' and '.join(named) or 'in another order'}; {way}")
    return [
        f"data: the {split} images are others than before ({saved[split]['images']} then, {now['images']} now);"
        " accuracies before and after do not compare"
        for split, now in contents.items()
        if saved[split] != now
    ]


def restore_model(path: Path, payload: State, model: nn.Module) -> None:
    load_state(model, payload["model"], f"{path}: the checkpoint is of another model")


def load_evaluated(path: Path, payload: State, model: nn.Module) -> None:
    """Load a checkpoint as evaluated: averaged weights with their statistics."""
    restore_model(path, payload, model)
    averages = payload["state"] and payload["state"]["ema"]
    if averages:
        ema = EMA(model, 0.0)
        ema.load_state_dict(averages)
        ema.copy_to(model)
    if payload["statistics"]:
        restore_statistics(model, payload["statistics"])


def save_float_weights(path: Path, model: nn.Module) -> None:
    """On rank 0, write the state_dict atomically as safetensors."""
    if rank():
        return
    # Safetensors refuses views and shared memory, and simple loaders expect every name: shared tensors are copied.
    state, layout = model.state_dict(), torch.contiguous_format
    tensors = {name: torch.clone(tensor.detach().cpu(), memory_format=layout) for name, tensor in state.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", DIGEST: state_digest(tensors)})


DIGEST = "sha256"  # key of the `state_digest` in the metadata, since safetensors has no checksums


class DamagedError(Exception):
    """Raised if a file's content is not what was written."""


def read_archive(path: Path) -> object:
    """Read tensors and plain values of a torch.save file; DamagedError if damaged."""
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
    """Read a safetensors file onto the CPU, and check its digest if it has one."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        digest = (file.metadata() or {}).get(DIGEST)
    if digest not in (None, state_digest(tensors)):
        raise DamagedError("its tensors are not those that were written")
    return tensors


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over every name, type, shape and byte of a state_dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        content = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {content.dtype} {tuple(content.shape)}".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_state(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state_dict strictly; errors become a sentence that begins with `where`."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:  # torch's message has one line for each difference
        differences = shorten(str(error).partition("\n")[2] or str(error), 300, placeholder=" ...")
        raise UserError(f"{where}: {differences}") from error


def about_model(config: RunConfig, classes: list[str], preprocessing: Preprocessing) -> Json:
    """Return model, classes, preprocessing, target, recipe, versions: plain values."""
    kept = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(preprocessing).items()}
    return {
        "model": config.model.name,
        "task": config.task.name,
        "classes": list(classes),
        **kept,
        "target": config.quantization.target,
        "recipe": config.quantization.model_dump(mode="json", exclude_defaults=True),
        "versions": {"qat": qat.__version__} | {name: version(name) for name in PACKAGES},
    }


def preprocessing_of(about: Json) -> Preprocessing:
    """Return the preprocessing noted by `about_model`; ValueError if incomplete."""
    try:
        about = {"stretched": False, **about}  # runs before boxes did not note it
        kept = {field.name: about[field.name] for field in fields(Preprocessing)}
        mean, std = (tuple(float(value) for value in kept[name]) for name in ("mean", "std"))
        return Preprocessing(**{**kept, "mean": mean, "std": std})
    except (KeyError, TypeError) as error:
        raise ValueError(f"what it says of the preprocessing is incomplete ({error})") from None


def export_metadata(about: Json, results: Json, model: nn.Module) -> Json:
    """Return metadata for `qat.export_onnx`: about, accuracies, epoch and digest."""
    found = {name: score_of(result) for name, result in results.items() if isinstance(result, dict)}
    stages = {name: score for name, score in found.items() if score is not None}
    known = {key: results["qat"][key] for key in ("weights", "epoch", "epochs")}
    return {**about, "accuracy": stages, **known, "state_sha256": state_digest(model.state_dict())}
