"""Which layers quantization costs accuracy: each with only it quantized, and with all but it, on validation images.

The run is measured as it is, without training: a change of bits needs a new run, whose training recovers some of it.
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
from qat.analysis.sensitivity import operands_of
from qat.cli.runs import Run, add_outputs, add_overrides, add_run, check_outputs, count, in_torch, open_run, save_figure
from qat.layers.twins import CompositeTwin
from qat.quantizer import Quantizer
from qat.text import table
from qat.training.config.file import load_config
from qat.training.errors import value_errors_reported
from qat.training.report.sensitivity import sensitivity_figure
from qat.training.run.checkpoint import state_digest
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

REFERENCES = ("baseline", "float")
"""What `qat.sensitivity` measures first."""

Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `sensitivity`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument(
        "--batches", type=count, metavar="N", help=f"validation batches, drawn at random; default: {IMAGES:,} images"
    )
    add_outputs(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print the table and what it suggests, and write the results."""
    opened = open_run(given.run_path, given.model)
    folder = opened.folder
    check_outputs(given)
    batches = _batches(opened, given)
    measured = _Evaluation(batches)
    with value_errors_reported(f"RUN: '{opened.path}': "):
        found = qat.sensitivity(opened.quantized, measured, lambda jobs: progress_bar(jobs, "sensitivity"))
    images = sum(len(labels) for _, labels in batches)
    digest = state_digest(opened.quantized.state_dict())
    result = {"images": images, "state_sha256": digest, **found}
    print("\n".join([*_table(result), "", *_suggestions(opened, result)]))
    text = json.dumps(result, indent=1) + "\n"
    for path in (folder / SENSITIVITY, *([Path(given.json).expanduser()] if given.json else [])):
        write_text(path, text)
    if given.plot:
        save_figure(sensitivity_figure(result), Path(given.plot).expanduser())
    return 0


def _batches(opened: Run, given: argparse.Namespace) -> list[Any]:
    """The batches to measure on, kept for all measurements; a part of the split is a random one, since files are
    often sorted by class."""
    config = load_config(str(opened.folder / RESOLVED_CONFIG), given.overrides).data
    size = config.eval_batch_size or 2 * config.batch_size
    wanted = size * (given.batches or math.ceil(IMAGES / size))
    there = (read_summary(opened.folder) or {}).get("val_images", wanted)
    limit = [f"data.limit_val={wanted}"] if wanted < min(there, config.limit_val or there) else []
    return list(opened.data([*given.overrides, *limit]).val)


class _Evaluation:
    """Top-1 in percent, the mean cross-entropy, and how far it may be by chance from that of the first two calls.

    Those are the whole model's and float's. Images are the same in all calls, so the noise is that of differences by
    image: two standard deviations of their mean.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.first: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        losses, correct = [], 0
        for images, labels in self.batches:
            scores = in_torch(model, images)
            losses.append(F.cross_entropy(scores.double(), labels, reduction="none"))
            correct += int((scores.argmax(1) == labels).sum())
        loss = torch.cat(losses)
        if len(self.first) < len(REFERENCES):
            self.first[REFERENCES[len(self.first)]] = loss
        spread = 2 / math.sqrt(max(len(loss) - 1, 1))
        noise = {
            f"noise_to_{name}": spread * float((loss - kept).std(correction=0)) for name, kept in self.first.items()
        }
        return {"top1": 100 * correct / len(loss), "loss": float(loss.mean()), **noise}


def _change(result: Result, row: Result, side: str, part: str) -> tuple[float, float, bool]:
    """Points of top-1 and loss against float (`only`) or the whole model (`all_but`), and if the latter is no noise."""
    reference, score = {"only": "float", "all_but": "baseline"}[side], row[side][part]
    loss = score["loss"] - result[reference]["loss"]
    return score["top1"] - result[reference]["top1"], loss, abs(loss) > score[f"noise_to_{reference}"]


def _cell(result: Result, row: Result, side: str, part: str) -> str:
    if part not in row[side]:
        return ""
    top1, loss, stands_out = _change(result, row, side, part)
    return f"{top1:+.2f} / {loss:+.4f}{'*' if stands_out else ' '}"


def _table(result: Result) -> list[str]:
    """The layers, those first whose grids cost most accuracy, and what has to be known to read them."""
    layers = sorted(result["layers"], key=lambda row: (row["only"]["both"]["top1"], -row["only"]["both"]["loss"]))
    head = ["layer", "only its weights", "only its activations", "both", "all but it"]
    columns = (("only", "weight"), ("only", "activation"), ("only", "both"), ("all_but", "both"))
    rows = [[row["name"], *(_cell(result, row, *column) for column in columns)] for row in layers]
    whole, plain = result["baseline"], result["float"]
    shared = sorted({", ".join(sorted([row["name"], *row["shared_with"]])) for row in layers if row["shared_with"]})
    return [
        *table([head, *rows], numbers=True), "",
        f"top1 {whole['top1']:.2f} %, loss {whole['loss']:.4f}; with all quantizers off, in float,"
        f" {plain['top1']:.2f} % and {plain['loss']:.4f}",
        "points of top1 / loss: of what is quantized alone, against float; of all but it, against the whole model",
        "*: the loss differs by more than two standard deviations of its differences by image",
        noise_of(whole["top1"], result["images"]),
        *([f"layers that read one quantized tensor: {'; '.join(shared)}"] if shared else []),
    ]  # fmt: skip


def suggested(result: Result, model: nn.Module) -> Result:
    """The changes of `quantization` that the measurement supports: 8 bits for what has fewer, float for what has 8.

    A part of a layer stands out if the model is worse with only it quantized, better with all but it, both beyond
    noise, and the latter gives back at least `SHARE` of what quantization costs in all.
    """
    cost = result["baseline"]["loss"] - result["float"]["loss"]
    if cost <= result["float"]["noise_to_baseline"]:
        return {}
    operands = operands_of(model)
    changes: Result = {}
    overrides: Result = {}
    for row in sorted(result["layers"], key=lambda row: row["all_but"]["both"]["loss"]):
        parts = [part for part in row["only"] if _stands_out(result, row, part, cost)]
        if not parts or len(overrides) == MOST:
            continue
        split = [part for part in parts if part != "both"] or [part for part in row["only"] if part != "both"]
        owned = {part: getattr(operands[row["name"]], part) for part in split}
        grids: Result = {part: _wider(each) for part, each in owned.items() if min(q.spec.bits for q in each) < BITS}
        if not isinstance(model.get_submodule(row["name"]), Quantizer):
            overrides[_key(model, row["name"])] = grids or {"skip": True}
        elif grids:  # what sums and averages read
            changes["residual_bits"] = BITS
    return {**changes, **({"overrides": overrides} if overrides else {})}


def _stands_out(result: Result, row: Result, part: str, cost: float) -> bool:
    _, worse, alone = _change(result, row, "only", part)
    _, better, without = _change(result, row, "all_but", part)
    return alone and without and worse > 0 and -better >= SHARE * cost


def _wider(quantizers: list[Quantizer]) -> Result:
    """The fields of 8 bits; rules of few levels have no such grid."""
    return {"bits": BITS, **({} if all(each.uniform for each in quantizers) else {"rule": "lsq"})}


def _key(model: nn.Module, name: str) -> str:
    """The key of a layer in `overrides`: of a product in a layer (attention, LSTM), that layer."""
    ends = [index for index, letter in enumerate(name) if letter == "."]
    return next((name[:end] for end in ends if isinstance(model.get_submodule(name[:end]), CompositeTwin)), name)


def _suggestions(opened: Run, result: Result) -> list[str]:
    found = suggested(result, opened.quantized)
    if result["baseline"]["top1"] >= result["float"]["top1"]:
        return ["quantization costs no accuracy on these images: nothing to change"]
    if not found:
        return ["no layer stands out beyond the noise of these images: nothing to suggest; more images may show more"]
    if "overrides" in found:
        own = opened.config.quantization.model_dump(mode="json", exclude_unset=True).get("overrides", {})
        kept = {key: value for key, value in own.items() if key not in found["overrides"]}
        found["overrides"] = kept | {key: {**own.get(key, {}), **value} for key, value in found["overrides"].items()}
    lines = yaml.safe_dump({"quantization": found}, sort_keys=False, default_flow_style=None, width=120).splitlines()
    return ["these layers stand out; for a new run's config, with the overrides that this one has:", "", *lines]
