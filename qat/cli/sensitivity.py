"""Which layers quantization costs accuracy: each with only it quantized, and with all but it, on validation images.

It measures the calibrated model, before QAT, whose weights are those of the float model. After QAT (`--trained`) the
weights live on their grids: at few bits they make no float model, and only the last column says something.
RUN/sensitivity.json keeps the results.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import qat
from qat.analysis.sensitivity import ROLES, operands_of
from qat.cli.runs import Run, add_outputs, add_overrides, add_run, check_outputs, count, in_torch, open_run, save_figure
from qat.layers.twins import CompositeTwin
from qat.quantizer import Quantizer
from qat.text import table
from qat.training.config.file import load_config
from qat.training.errors import value_errors_reported
from qat.training.report.sensitivity import sensitivity_figure
from qat.training.run.files import write_text
from qat.training.run.folder import RESOLVED_CONFIG, SENSITIVITY, read_summary
from qat.training.run.logging import progress_bar
from qat.training.run.report import noise_of

EXAMPLE = "python -m qat sensitivity runs/resnet_int8 --plot sensitivity.png"

IMAGES = 1024
"""About so many images are used without `--batches`."""

BITS = 8
"""What a layer gets that stands out with fewer."""

MOST = 5
"""Layers that get a suggestion, at most."""

SHARE = 0.1
"""Of what quantization costs in all, the least that a layer must give back to get one."""

Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `sensitivity`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument(
        "--batches", type=count, metavar="N", help=f"validation batches, drawn at random; default: {IMAGES:,} images"
    )
    parser.add_argument("--trained", action="store_true", help="measure the model after QAT")
    add_outputs(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print the table and what it suggests, and write the results."""
    opened = open_run(given.run_path, given.model)
    file = opened.folder / SENSITIVITY
    check_outputs(given)
    data = opened.data([*given.overrides, *_limit(opened, given)])
    model = opened.quantized if given.trained else opened.calibrated(data)
    evaluate = _Evaluation(list(data.val))
    with value_errors_reported(f"RUN: '{opened.path}': "):
        found = qat.sensitivity(model, evaluate, lambda jobs: progress_bar(jobs, "sensitivity"))
    result = {"images": evaluate.images, "weights": "trained" if given.trained else "calibrated", **found}
    print("\n".join([*_table(result), "", *_suggestions(opened, result, model)]))
    for path in (file, *([Path(given.json).expanduser()] if given.json else [])):
        write_text(path, json.dumps(result, indent=1) + "\n")
    if given.plot:
        save_figure(sensitivity_figure(result), Path(given.plot).expanduser())
    return 0


def _limit(opened: Run, given: argparse.Namespace) -> list[str]:
    """The override for a part of the split: a random one, since files are often sorted by class."""
    config = load_config(str(opened.folder / RESOLVED_CONFIG), given.overrides).data
    size = config.eval_batch_size or 2 * config.batch_size
    wanted = size * (given.batches or math.ceil(IMAGES / size))
    there = (read_summary(opened.folder) or {}).get("val_images", wanted)
    return [f"data.limit_val={wanted}"] if wanted < min(there, config.limit_val or there) else []


class _Evaluation:
    """Top-1 in percent, the mean cross-entropy, and how far it may be by chance from that of the first two calls.

    Those are the whole model's and float's. Images are the same in all calls, so the noise is that of differences by
    image: two standard deviations of their mean.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.images = batches, sum(len(labels) for _, labels in batches)
        self.first: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        losses, correct = [], 0
        for images, labels in self.batches:
            scores = in_torch(model, images)
            losses.append(F.cross_entropy(scores.double(), labels, reduction="none"))
            correct += int((scores.argmax(1) == labels).sum())
        loss = torch.cat(losses)
        if len(self.first) < 2:
            self.first["noise_to_float" if self.first else "noise_to_baseline"] = loss
        noise = {key: 2 * float((loss - kept).std()) / math.sqrt(self.images) for key, kept in self.first.items()}
        return {"top1": 100 * correct / self.images, "loss": float(loss.mean()), **noise}


def _change(result: Result, row: Result, side: str, part: str) -> tuple[float, float, bool]:
    """Points of top-1 and loss against float (`only`) or the whole model (`all_but`), and if the latter is no noise."""
    reference, score = {"only": "float", "all_but": "baseline"}[side], row[side][part]
    top1, loss = (score[key] - result[reference][key] for key in ("top1", "loss"))
    return top1, loss, abs(loss) > score[f"noise_to_{reference}"]


def _cell(result: Result, row: Result, side: str, part: str) -> str:
    if part not in row[side]:
        return ""
    top1, loss, stands_out = _change(result, row, side, part)
    return f"{top1:+.2f} / {loss:+.4f}{'*' if stands_out else ' '}"


def _table(result: Result) -> list[str]:
    """The layers, those first whose grids cost most accuracy, and what has to be known to read them."""
    layers = sorted(result["layers"], key=lambda row: (row["only"]["both"]["top1"], -row["only"]["both"]["loss"]))
    columns = (("only", "weight"), ("only", "activation"), ("only", "both"), ("all_but", "both"))
    rows = [[row["name"], *(_cell(result, row, *column) for column in columns)] for row in layers]
    whole, plain = result["baseline"], result["float"]
    shared = sorted({", ".join(sorted([row["name"], *row["shared_with"]])) for row in layers if row["shared_with"]})
    return [
        *table([["layer", "only its weights", "only its activations", "both", "all but it"], *rows], numbers=True), "",
        f"{result['weights']}: top1 {whole['top1']:.2f} %, loss {whole['loss']:.4f}; with all quantizers off:"
        f" {plain['top1']:.2f} %, {plain['loss']:.4f}",
        "top1 in points / loss: of only it against all off, of all but it against all on; *: the loss differs beyond"
        " noise, two standard deviations of its differences by image",
        noise_of(whole["top1"], result["images"]),
        *([f"layers that read one quantized tensor: {'; '.join(shared)}"] if shared else []),
    ]  # fmt: skip


def suggested(result: Result, model: nn.Module) -> Result:
    """The changes of `quantization` that the measurement supports: 8 bits for what has fewer, float for what has 8.

    A part of a layer stands out if the model is worse with only it quantized and better with all but it, both beyond
    noise, and the latter gives back at least `SHARE` of what quantization costs in all.
    """
    cost = result["baseline"]["loss"] - result["float"]["loss"]
    overrides: Result = {}
    residual: Result = {}
    for row in sorted(result["layers"], key=lambda row: row["all_but"]["both"]["loss"]):
        name, parts = row["name"], operands_of(model)[row["name"]]
        found = [part for part in row["only"] if _stands_out(result, row, part, cost)]
        low: Result = {
            part: {"bits": BITS} if quantizers[0].uniform else {"bits": BITS, "rule": "lsq"}
            for part, quantizers in parts.items()
            if (part in found or found == ["both"]) and quantizers[0].spec.bits < BITS
        }
        ends = [name[:place] for place, letter in enumerate(name) if letter == "."]
        key = next((end for end in ends if isinstance(model.get_submodule(end), CompositeTwin)), name)
        if key == name and isinstance(model.get_submodule(name), Quantizer):  # sums and averages read it
            residual |= {"residual_bits": BITS} if low else {}
        elif found and len(overrides) < MOST:
            change: Result = low or {"skip": True}
            overrides[key] = overrides.get(key, {}) | change
    return {**residual, **({"overrides": overrides} if overrides else {})}


def _stands_out(result: Result, row: Result, part: str, cost: float) -> bool:
    _, worse, alone = _change(result, row, "only", part)
    _, better, without = _change(result, row, "all_but", part)
    return alone and without and worse > 0 and -better >= SHARE * max(cost, 0)


def _suggestions(opened: Run, result: Result, model: nn.Module) -> list[str]:
    if result["baseline"]["top1"] >= result["float"]["top1"]:
        return ["quantization costs no accuracy on these images: nothing to change"]
    found = suggested(result, model)
    if not found:
        return ["no layer stands out beyond the noise of these images: nothing to suggest"]
    own = opened.config.quantization.model_dump(mode="json", exclude_none=True)["overrides"]
    new = found.get("overrides", {})
    merged = {key: value for key, value in own.items() if key not in new}  # later keys win
    for key, change in new.items():
        grids = {part: own.get(key, {}).get(part, {}) | change.get(part, {}) for part in ROLES}
        merged[key] = {**change, **{part: grid for part, grid in grids.items() if grid}}
    if merged:
        found["overrides"] = merged
    lines = yaml.safe_dump({"quantization": found}, sort_keys=False, default_flow_style=None, width=120).splitlines()
    return ["what stands out, for the config of a new run, with the overrides that this one has:", "", *lines]
