"""Measure latency and size of the integer model, beside float in the same runtime.

Rows are by batch size and threads. In LiteRT and TensorFlow Lite Micro only the integer model is measured.
The integer model runs as its answers are proven. Where the runtime's default session multiplies otherwise (x86 without
VNNI), it has a second row, with the share of a batch of validation images for which it predicts the same.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch

from qat.cli.runs import add_run, check_folder_of, count, counts, open_run
from qat.cli.runtimes import RUNTIMES, Array, Session, default_differs, open_file
from qat.export.onnx.program import quiet_export
from qat.text import first_line, table
from qat.training.errors import UserError
from qat.training.report.figures import can_draw
from qat.training.run.folder import LATENCY, MODEL, Json

EXAMPLE = "python -m qat benchmark runs/resnet_int8 --batch 1,16 --threads 1,2 --plot latency.png"
ROUND = 0.05  # seconds that a model runs before the next one's turn; at least one call
DEFAULT = "integers, default session"  # row of a session without options, where that does not multiply exactly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), help="default: onnxruntime, or litert for a .tflite")
    parser.add_argument(
        "--batch", type=counts, metavar="N,N", help="batch sizes; default: 1,16, or the only one that the file takes"
    )
    parser.add_argument("--threads", type=counts, default=[1], metavar="N,N", help="threads; default: 1")
    parser.add_argument("--rounds", type=count, default=15, help="turns of each model; the median counts; default: 15")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw them, .png or .svg (needs matplotlib)")


def run(given: argparse.Namespace) -> int:
    opened = open_run(given.run_path, given.model)
    runtime = given.runtime or (opened.runtime if opened.runtime in RUNTIMES else "onnxruntime")
    if given.plot and not can_draw():
        raise UserError("--plot: needs matplotlib; pip install matplotlib, or leave --plot out")
    for option, file in (("--json", given.json), ("--plot", given.plot)):
        if file:
            check_folder_of(option, Path(file).expanduser())
    path, agreement = opened.file(runtime), dict[str, float | None]()  # with the exact session's answers, by row
    only = open_file(path, runtime).shape[0]  # 0 if the file takes any batch
    if only and given.batch not in (None, [only]):
        raise UserError(f"--batch: {path} takes batches of {only} alone; leave --batch out")
    batches = [only] if only else given.batch or [1, 16]
    if default_differs(runtime):
        agreement[DEFAULT] = None
        if opened.path.is_dir():
            images = next(iter(opened.data(given.overrides).val))[0]
            exact, default = (opened.task.classes(opened.engine(runtime, exact=way)(images)) for way in (True, False))
            agreement[DEFAULT] = float((exact == default).double().mean())
    with tempfile.TemporaryDirectory(prefix="qat_benchmark_") as folder:
        models = dict.fromkeys(("integers", *agreement), path)
        if opened.path.is_dir() and RUNTIMES[runtime].file == MODEL:
            models["float"], size = Path(folder) / "float.onnx", opened.config.data.image_size
            with quiet_export():
                torch.onnx.export(
                    opened.float_model, (torch.zeros(2, 3, size, size),), str(models["float"]), dynamo=True,
                    verbose=False, dynamic_shapes=({0: torch.export.Dim.AUTO},), external_data=False,
                )  # fmt: skip
        rows = []
        for threads in given.threads:
            sessions = {
                name: open_file(path, runtime, exact=name != DEFAULT, threads=threads) for name, path in models.items()
            }
            rows += [row for batch in batches for row in _measured(sessions, batch, threads, given.rounds)]
        sizes = {name: path.stat().st_size for name, path in models.items() if name != DEFAULT}
    results: Json = {
        "rows": [{**row, "agreement": agreement.get(row["model"])} for row in rows],
        "bytes": sizes,
        "runtime": runtime,
        runtime: version(RUNTIMES[runtime].package),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
    print("\n".join(_shown(results, RUNTIMES[runtime].title)))
    opened.keep(LATENCY, results)
    if given.json:
        Path(given.json).expanduser().write_text(json.dumps(results, indent=1) + "\n")
    if given.plot:
        _draw(results["rows"], Path(given.plot).expanduser())
    return 0


def _measured(sessions: dict[str, Session], batch: int, threads: int, rounds: int) -> list[Json]:
    feeds = {}
    for name, session in sessions.items():
        shape = [batch, *(side or 224 for side in session.shape[1:])]
        numbers = np.random.default_rng(0)
        feeds[name] = (
            numbers.integers(0, 256, shape, np.uint8) if session.pixels else numbers.standard_normal(shape, np.float32)
        )
        session.run(feeds[name])  # warms up
    # In turns, so that a processor that slows down slows all of them.
    turns = [{name: _one_turn(each, feeds[name]) for name, each in sessions.items()} for _ in range(rounds)]
    found = {name: median(turn[name] for turn in turns) for name in sessions}
    return [
        {
            "model": name, "batch": batch, "threads": threads, "milliseconds": 1000 * seconds,
            "images_per_second": batch / seconds,
            "of_float": seconds / found["float"] if "float" in found else None,
        }
        for name, seconds in found.items()
    ]  # fmt: skip


def _one_turn(session: Session, images: Array) -> float:  # the mean seconds of a call
    started, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < ROUND or not calls:
        session.run(images)
        calls += 1
    return spent / calls


def _shown(results: Json, runtime: str) -> list[str]:
    head = ["model", "batch", "threads", "ms", "images/s", "of float", "agreement"]
    cells = [
        [
            row["model"], str(row["batch"]), str(row["threads"]), f"{row['milliseconds']:.2f}",
            f"{row['images_per_second']:,.0f}", "" if row["of_float"] is None else f"{row['of_float']:.2f}",
            "" if row["agreement"] is None else f"{100 * row['agreement']:.2f} %",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    named = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in results["bytes"].items())
    inexact = any(row["model"] == DEFAULT for row in results["rows"])
    warning = f"{runtime}'s default session adds products in 16 bits on this processor (no VNNI): docs/targets.md"
    return [
        *table([head, *cells], numbers=True), "", f"files: {named}",
        f"{runtime} {results[results['runtime']]}, {results['processor']}; medians of alternating turns",
        *([warning] if inexact else []),
    ]  # fmt: skip


def _draw(rows: list[Json], path: Path) -> None:
    from matplotlib.figure import Figure

    threads, batches, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("threads", "batch", "model"))
    width = 0.8 / len(models)
    figure = Figure(figsize=(1.5 + 2.5 * len(threads), 3.2), layout="constrained")
    for axes, number in zip(figure.subplots(1, len(threads), squeeze=False)[0], threads, strict=True):
        for place, model in enumerate(models):
            found = {
                row["batch"]: row["milliseconds"] for row in rows if row["threads"] == number and row["model"] == model
            }
            left = [index + place * width for index in range(len(batches))]
            bars = axes.bar(left, [found[batch] for batch in batches], width=0.95 * width, label=model)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_xticks([index + 0.5 * width * (len(models) - 1) for index in range(len(batches))], map(str, batches))
        axes.set(title=f"{number} thread{'s' * (number > 1)}", xlabel="images a call", ylabel="ms", yscale="log")
        axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UserError(f"--plot: '{path}': {first_line(error)}") from error
