"""Measure which layers cost accuracy, each quantized alone, and all but each.

On validation images, it measures the calibrated model, before QAT, whose weights are those of the float model. After
QAT (`--trained`) the weights live on their grids: at few bits they make no float model, and only the last column says
something. RUN/sensitivity.json keeps the results, and `report` draws them.
"""

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import qat
from qat.analysis.sensitivity import operands_of
from qat.cli.runs import add_run, count, in_torch, open_run
from qat.layers import QuantLayer
from qat.layers.twins import CompositeTwin
from qat.text import table
from qat.training.data.loaders import Batch
from qat.training.errors import UserError, value_errors_reported
from qat.training.report.findings import ReportedRun, change_of, stands_out
from qat.training.report.page import write_report
from qat.training.run.folder import REPORT, SENSITIVITY, read_summary
from qat.training.run.logging import progress_bar
from qat.training.tasks.known import CLASSIFICATION

EXAMPLE = "python -m qat sensitivity runs/resnet_int8"
BITS = 8  # suggested for a layer that stands out with fewer
MOST = 5  # suggested layers
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    parser.add_argument("--images", type=count, default=1024, metavar="N", help="drawn at random; default: 1,024")
    parser.add_argument("--trained", action="store_true", help="measure the model after QAT")


def run(given: argparse.Namespace) -> int:
    opened = open_run(given.run_path, given.model)
    if opened.config.task is not CLASSIFICATION:
        raise UserError(f"sensitivity: is for classifiers; RUN: '{opened.path}' is for {opened.config.task.name}")
    # A limit above the split's size would only warn.
    there = (read_summary(opened.folder) or {}).get("val_images", math.inf)
    limit = [f"data.limit_val={given.images}"] if given.images < there else []
    data = opened.data([*limit, *given.overrides])
    model = opened.quantized if given.trained else opened.calibrated(data)
    evaluate = _Evaluation(list(data.val))
    with value_errors_reported(f"RUN: '{opened.path}': "):
        found = qat.sensitivity(model, evaluate, lambda jobs: progress_bar(jobs, "sensitivity"))
    result = {"images": evaluate.images, "weights": "trained" if given.trained else "calibrated", **found}
    print("\n".join(_table(result)), flush=True)
    opened.keep(SENSITIVITY, result)
    page = opened.folder / REPORT
    said = write_report(page, [ReportedRun(opened.folder)], pictures=True) or [f"figure: {page}#sensitivity"]
    print(*said, sep="\n", end="\n\n")
    if overrides := suggested(result, model):
        print("what stands out, for the config of a new run, beside the overrides of this one:\n")
        text = {"quantization": {"overrides": overrides}}
        print(yaml.safe_dump(text, sort_keys=False, default_flow_style=None, width=120), end="")
    else:
        print("no layer stands out beyond the noise of these images: nothing to suggest")
    return 0


# Top-1 in percent, mean cross-entropy, and two standard deviations of its difference to the first two calls', which are
# of the whole model and of float. The images are the same in all calls, so deviations are those by image.
class _Evaluation:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.images = batches, sum(len(labels) for _, labels in batches)
        self.first: list[Tensor] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        labels = torch.cat([labels for _, labels in self.batches])
        scores = torch.cat([in_torch(model, images) for images, _ in self.batches]).double()
        loss = F.cross_entropy(scores, labels, reduction="none")
        self.first = [*self.first, loss][:2]
        noise = [2 * float((loss - each).std()) / math.sqrt(self.images) for each in self.first]
        top1 = 100 * int((scores.argmax(1) == labels).sum()) / self.images
        return {"top1": top1, "loss": float(loss.mean()), "noise_to_baseline": noise[0], "noise_to_float": noise[-1]}


def _table(result: Result) -> list[str]:
    columns = (("only", "weight"), ("only", "activation"), ("only", "both"), ("all_but", "both"))
    layers = sorted(result["layers"], key=lambda row: -row["only"]["both"]["loss"])
    rows = [[row["name"]] for row in layers]
    for cells, row in zip(rows, layers, strict=True):
        for side, part in columns:
            top1, loss, beyond = change_of(result, row, side, part) if part in row[side] else (0, 0, False)
            cells.append(f"{top1:+.2f} / {loss:+.4f}{'*' if beyond else ' '}" if part in row[side] else "")
    whole, plain = ("top1 {top1:.2f} %, loss {loss:.4f}".format(**result[key]) for key in ("baseline", "float"))
    return [
        *table([["layer", "only its weights", "only its activations", "both", "all but it"], *rows], numbers=True), "",
        f"{result['weights']}: {whole}; in float: {plain}; {result['images']:,} images",
        "points of top1 / loss: of only it against float, of all but it against the whole model; *: beyond noise",
    ]  # fmt: skip


def suggested(result: Result, model: nn.Module) -> Result:
    """Return overrides for layers that stand out: 8 bits, or float at 8 already."""
    found = Result()
    for row in sorted(result["layers"], key=lambda row: row["all_but"]["both"]["loss"]):
        layer, owner = (model.get_submodule(name) for name in (row["name"], row["name"].rpartition(".")[0]))
        has_key = isinstance(layer, QuantLayer) and not isinstance(owner, CompositeTwin)
        if has_key and stands_out(result, row) and len(found) < MOST:
            parts = [each for role, [each, *_] in operands_of(model)[row["name"]].items() if role != "both"]
            low = {each.role: each for each in parts if each.spec.bits < BITS}
            more = {role: {"bits": BITS, **({} if each.uniform else {"rule": "lsq"})} for role, each in low.items()}
            found[row["name"]] = more or {"skip": True}
    return found
