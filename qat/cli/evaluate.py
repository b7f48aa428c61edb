"""Measure validation accuracy in one or several runtimes, and their agreement.

Where a runtime's default session does not multiply exactly (x86 without VNNI), it has a row of its own.
"""

import argparse
import json
import time

import torch
from torch import Tensor

from qat.cli.runs import add_run, open_run
from qat.cli.runtimes import RUNTIMES, default_differs
from qat.text import table
from qat.training.run.folder import Json
from qat.training.run.logging import progress_bar
from qat.training.run.report import noise_of

EXAMPLE = "python -m qat evaluate runs/resnet_int8 --runtime torch,onnxruntime"
CHOICES = ("torch", "onnxruntime", "float", *list(RUNTIMES)[1:])
DEFAULT = CHOICES[:3]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    named = f"of {', '.join(CHOICES)}, with commas; default: the first three"
    parser.add_argument("--runtime", type=_runtimes, help=named)
    parser.add_argument("--json", action="store_true", help="write the results as JSON")


def _runtimes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in CHOICES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(CHOICES)}")
    return list(dict.fromkeys(names))


def run(given: argparse.Namespace) -> int:
    opened = open_run(given.run_path, given.model)
    data, task = opened.data(given.overrides), opened.task
    asked = given.runtime or [name for name in DEFAULT if name != "onnxruntime" or opened.has(name)]
    ways = [(name, exact) for name in asked for exact in ((True, False) if default_differs(name) else (True,))]
    found = {f"{name}{'' if exact else ', default session'}": opened.engine(name, exact=exact) for name, exact in ways}
    results: list[Json] = []
    first = None
    for name, engine in found.items():
        answers, counts, images_seen, seconds = list[Tensor](), list[Tensor](), 0, 0.0
        with progress_bar(data.val, name) as bar:
            for images, truth in bar:
                started = time.perf_counter()
                scores = engine(images)
                seconds += time.perf_counter() - started
                answers.append(task.classes(scores))
                counts.append(task.counts(scores, truth))
                images_seen += len(truth)
        answered = torch.cat(answers)
        first = answered if first is None else first
        results.append({
            "runtime": name,
            task.metric: task.score(task.merged(counts)).value,
            "images": images_seen,
            "images_per_second": images_seen / seconds,
            "same_answers": float((answered == first).double().mean()),
        })  # fmt: skip
    if given.json:
        print(json.dumps(results, indent=1))
    else:
        rows = [
            [each["runtime"], f"{each[task.metric]:.2f}", f"{100 * each['same_answers']:.2f} %"] for each in results
        ]
        rows[0][2] = ""
        cells = [[*row, f"{each['images_per_second']:,.0f}"] for row, each in zip(rows, results, strict=True)]
        head = ["runtime", f"{task.title} %", f"as {results[0]['runtime']}", "images/s"]
        print("\n".join([*table([head, *cells], numbers=True), "", *noise_of(results[0], images_seen)]))
    return 0
