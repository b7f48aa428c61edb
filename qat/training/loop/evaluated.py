"""The weights of a checkpoint as they were evaluated, and the choice of those that a run ends with: best or last."""

from pathlib import Path
from typing import Any

from torch import nn

from qat.batch_norm import restore_statistics
from qat.finetuning import EMA
from qat.training.errors import UserError
from qat.training.loop.evaluation import Evaluation, evaluate
from qat.training.loop.stage import StageRun
from qat.training.run.checkpoint import load_checkpoint, restore_model
from qat.training.run.folder import BEST_CHECKPOINT


def load_evaluated(path: Path, payload: dict[str, Any], model: nn.Module) -> None:
    """Load a checkpoint as evaluated: averages in place of trained weights, and BatchNorm's statistics for them."""
    restore_model(path, payload, model)
    averages = payload["state"] and payload["state"]["ema"]
    if averages:
        ema = EMA(model, 0.0)
        ema.load_state_dict(averages)
        ema.copy_to(model)
    if payload["statistics"]:
        restore_statistics(model, payload["statistics"])


def choose_weights(run: StageRun, last: Evaluation) -> tuple[int, Evaluation]:
    """At the end of QAT, load the best epoch if `export.weights` says so; return the epoch and its evaluation."""
    path, epochs = run.folder / BEST_CHECKPOINT, run.stage.epochs
    if run.config.export.weights == "last" or epochs == 0:
        return epochs, last
    if not path.is_file():
        raise UserError(f"export.weights: 'best' needs {path}, which is missing; set export.weights=last")
    payload = load_checkpoint(path, "set export.weights=last")
    if payload["epochs"] == epochs:
        return epochs, last
    load_evaluated(path, payload, run.model)
    return payload["epochs"], evaluate(run.model, run.val, run.device, channels_last=run.config.channels_last)


def describe_choice(now: dict[str, Any], before: dict[str, Any]) -> str:
    """Which weights are exported, and which of an earlier export they replace.

    Both are sections `qat` of summary.json; `before` is empty if nothing was exported.

    >>> three = {"weights": "last", "epoch": 3, "epochs": 3}
    >>> describe_choice(three, {})
    'epoch 3 of 3 (last)'
    >>> describe_choice(three, {"weights": "best", "epoch": 2, "epochs": 3})
    'epoch 3 of 3 (last) replaces epoch 2 of 3 (best) in model.onnx; export.weights=best brings that back'
    """
    new, old = ("epoch {epoch} of {epochs} ({weights})".format(**each) if each else "" for each in (now, before))
    if not before or new == old:
        return new
    back = f"; export.weights={before['weights']} brings that back" if now["epochs"] == before["epochs"] else ""
    return f"{new} replaces {old} in model.onnx{back}"
