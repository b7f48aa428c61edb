"""Metadata that a deployment needs (classes, preprocessing, versions), in checkpoints, summary.json and model.onnx."""

from dataclasses import asdict, fields
from importlib.metadata import version
from typing import Any

from torch import nn

import qat
from qat.training.config.schema import RunConfig
from qat.training.data.transforms import Preprocessing
from qat.training.run.archive import state_digest


def about_model(config: RunConfig, classes: list[str], preprocessing: Preprocessing) -> dict[str, Any]:
    """Plain values: model, classes, the fields of `Preprocessing`, target, recipe as in the config, versions."""
    kept = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(preprocessing).items()}
    return {
        "model": config.model.name,
        "classes": list(classes),
        **kept,
        "target": config.quantization.target,
        "recipe": config.quantization.model_dump(mode="json", exclude_defaults=True),
        "versions": {"qat": qat.__version__} | {name: version(name) for name in PACKAGES},
    }


PACKAGES = ("torch", "torchvision", "onnx", "onnxruntime")
"""The packages whose versions are kept."""


def preprocessing_of(about: dict[str, Any]) -> Preprocessing:
    """The preprocessing that `about_model` noted; ValueError if it is incomplete."""
    try:
        kept = {field.name: about[field.name] for field in fields(Preprocessing)}
        mean, std = (tuple(float(value) for value in kept[name]) for name in ("mean", "std"))
        return Preprocessing(**{**kept, "mean": mean, "std": std})
    except (KeyError, TypeError) as error:
        raise ValueError(f"what it says of the preprocessing is incomplete ({error})") from None


def export_metadata(about: dict[str, Any], results: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """For `qat.export_onnx(metadata=...)`: `about`, the stages' accuracies, the epoch, and `state_digest`."""
    stages = {name: result["top1"] for name, result in results.items() if isinstance(result, dict) and "top1" in result}
    known = {key: results["qat"][key] for key in ("weights", "epoch", "epochs")}
    return {**about, "accuracy": stages, **known, "state_sha256": state_digest(model.state_dict())}
