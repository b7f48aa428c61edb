"""The accuracy of a run's model on its validation split, in one or several runtimes, and whether they agree.

Where a runtime's default session does not multiply exactly (x86 without VNNI), it has a row of its own.
"""

import argparse
import json
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qat.cli.runs import Engine, add_overrides, add_run, open_run, several
from qat.cli.runtimes import RUNTIMES, default_differs
from qat.text import table
from qat.training.run.folder import EVALUATION
from qat.training.run.logging import progress_bar
from qat.training.run.report import noise_of

EXAMPLE = "python -m qat evaluate runs/resnet_int8 --runtime torch,onnxruntime"
CHOICES = ("torch", "onnxruntime", "float", *list(RUNTIMES)[1:])
DEFAULT = CHOICES[:3]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `evaluate`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument(
        "--runtime", type=several(CHOICES), help=f"of {', '.join(CHOICES)}, with commas; default: the first three"
    )
    parser.add_argument("--json", action="store_true", help="write the results as JSON")


def run(given: argparse.Namespace) -> int:
    """Print the table."""
    opened = open_run(given.run_path, given.model)
    data = opened.data(given.overrides)
    asked = given.runtime or [name for name in DEFAULT if name != "onnxruntime" or opened.has(name)]
    ways = [(name, exact) for name in asked for exact in ((True, False) if default_differs(name) else (True,))]
    found = [
        _answers(f"{name}{'' if exact else ', default session'}", opened.engine(name, exact=exact), data.val)
        for name, exact in ways
    ]
    truth = found[0]["truth"]
    results = [
        {
            "runtime": each["runtime"],
            "top1": 100 * float((each["answers"] == truth).double().mean()),
            "images": len(truth),
            "images_per_second": len(truth) / each["seconds"],
            "same_answers": float((each["answers"] == found[0]["answers"]).double().mean()),
        }
        for each in found
    ]
    if given.json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join([*_table(results), "", noise_of(results[0]["top1"], results[0]["images"])]))
    opened.keep(EVALUATION, {"rows": results})
    return 0


def _answers(name: str, engine: Engine, batches: Iterable[Any]) -> dict[str, Any]:
    answers: list[Tensor] = []
    labels: list[Tensor] = []
    seconds = 0.0
    with progress_bar(batches, name) as bar:
        for images, truth in bar:
            started = time.perf_counter()
            answers.append(engine(images).argmax(1))
            seconds += time.perf_counter() - started
            labels.append(truth)
    return {"runtime": name, "answers": torch.cat(answers), "truth": torch.cat(labels), "seconds": seconds}


def _table(results: list[dict[str, Any]]) -> list[str]:
    first = results[0]["runtime"]
    rows = [
        [
            each["runtime"],
            f"{each['top1']:.2f}",
            "" if each["runtime"] == first else f"{100 * each['same_answers']:.2f} %",
            f"{each['images_per_second']:,.0f}",
        ]
        for each in results
    ]
    return table([["runtime", "top1 %", f"as {first}", "images/s"], *rows], numbers=True)
