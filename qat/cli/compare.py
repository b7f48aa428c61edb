"""Compare runs: differences of their configs, and their results.

It reads config.yaml and summary.json alone. Rows of the config in which all runs are equal are left out.
"""

import argparse
import itertools
import json
from typing import Any

from qat.cli.runs import open_run
from qat.text import table
from qat.training.config.file import flat
from qat.training.errors import UserError
from qat.training.run.folder import Json, read_summary
from qat.training.run.report import ROWS
from qat.training.tasks.known import score_of, task_in

EXAMPLE = "python -m qat compare runs/resnet_int8 runs/resnet_int8-2"
PLACE = {"run_dir", "resume"}  # the place of a run, no part of what it does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py, two or more")
    parser.add_argument("--json", action="store_true", help="write the comparison as JSON")


def run(given: argparse.Namespace) -> int:
    if len(given.runs) < 2:
        raise UserError("RUN: one run has nothing to be compared with; name two or more")
    opened = [open_run(path) for path in given.runs]
    summaries = [read_summary(each.folder) for each in opened]
    configs = _beside([flat(each.config.model_dump(mode="json", exclude=PLACE)) for each in opened])
    versions = _beside([(summary or {}).get("versions", {}) for summary in summaries])
    found: Json = {
        "runs": given.runs,
        "unfinished": [path for path, summary in zip(given.runs, summaries, strict=True) if summary is None],
        "config": {key: values for key, values in configs.items() if any(each != values[0] for each in values)},
        "results": _beside([_results(summary or {}) for summary in summaries]),
        "versions": {key: values for key, values in versions.items() if len({*values} - {None}) > 1},  # that differ
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    rows = {**found["config"], **found["results"], **found["versions"]}
    cells = [[key, *("-" if each is None else str(each) for each in values)] for key, values in rows.items()]
    said = [] if found["config"] else ["", "the configs are equal"]
    said += [f"{path}: not finished; train.py finishes it with resume=auto" for path in found["unfinished"]]
    print("\n".join([*table([["", *found["runs"]], *cells], numbers=True), *said]))
    return 0


def _beside(columns: list[Json]) -> dict[str, list[Any]]:
    return {key: [column.get(key) for column in columns] for key in dict.fromkeys(itertools.chain(*columns))}


def _results(summary: Json) -> Json:
    onnx = summary.get("onnx", {})
    scores = {
        f"{task_in(summary[key]).title} % {words}": score_of(summary[key])
        for key, words in ROWS.items()
        if key in summary
    }
    found = {**scores, "seconds": summary.get("seconds"), "problem": summary.get("problem")}
    if onnx:
        differing, size = onnx["layers"]["differing"], onnx["size_bytes"] / 1e6
        found |= {"agreement %": 100 * onnx["agreement"], "integers that differ": differing, "model.onnx MB": size}
    return {key: round(each, 2) if isinstance(each, float) else each for key, each in found.items() if each is not None}
