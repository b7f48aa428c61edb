"""How fast the integer model is beside float in the same runtime: latency by batch size and threads, and sizes."""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from qat.cli.arguments import add_run, check_folder_of, counts
from qat.cli.plot import check_plot, draw_latencies
from qat.cli.runs import Run, open_run, takes_pixels
from qat.export.onnx.program import quiet_export
from qat.text import table

EXAMPLE = "python -m qat benchmark runs/resnet_int8 --batch 1,16 --threads 1,2 --plot latency.png"

ROUND = 0.05
"""Seconds that a model runs before the other one's turn, at least one call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `benchmark`."""
    add_run(parser)
    parser.add_argument("--batch", type=counts, default=[1, 16], metavar="N,N", help="batch sizes; default: 1,16")
    parser.add_argument("--threads", type=counts, default=[1], metavar="N,N", help="threads; default: 1")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each model; the median counts; default: 15")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw them, .png or .svg (needs matplotlib)")


def run(given: argparse.Namespace) -> int:
    """Measure, turn by turn, and print the table."""
    opened = open_run(given.run_path, given.model)
    if given.plot:
        check_plot()
    for option, file in (("--json", given.json), ("--plot", given.plot)):
        if file:
            check_folder_of(option, Path(file).expanduser())
    with tempfile.TemporaryDirectory(prefix="qat_benchmark_") as folder:
        models = {"integers": opened.onnx}
        if opened.path.is_dir():
            models["float"] = _float_file(opened, Path(folder) / "float.onnx")
        rows = [
            row
            for threads in given.threads
            for batch in given.batch
            for row in _measured(models, batch, threads, max(given.rounds, 1))
        ]
        sizes = {name: path.stat().st_size for name, path in models.items()}
    print("\n".join(_shown(rows, sizes)))
    results = {"rows": rows, "bytes": sizes, **_machine()}
    if given.json:
        Path(given.json).expanduser().write_text(json.dumps(results, indent=1) + "\n")
    if given.plot:
        draw_latencies(results, Path(given.plot).expanduser())
    return 0


def _float_file(opened: Run, path: Path) -> Path:
    """The float model of the run as an ONNX file."""
    size = opened.config.data.image_size
    with quiet_export():
        torch.onnx.export(
            opened.float_model, (torch.zeros(2, 3, size, size),), str(path), dynamo=True, verbose=False,
            dynamic_shapes=({0: torch.export.Dim.AUTO},), external_data=False,
        )  # fmt: skip
    return path


def _measured(models: dict[str, Path], batch: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """The median time of a call of each model, whose turns alternate, and its share of float's."""
    sessions = {name: _session(path, threads) for name, path in models.items()}
    feeds = {}
    for name, session in sessions.items():
        declared = session.get_inputs()[0]
        shape = [batch, *(side if isinstance(side, int) else 224 for side in declared.shape[1:])]
        numbers = np.random.default_rng(0)
        images = (
            numbers.integers(0, 256, shape, np.uint8)
            if takes_pixels(session)
            else numbers.standard_normal(shape, np.float32)
        )
        feeds[name] = {declared.name: images}
        session.run(None, feeds[name])
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, session in sessions.items():
            times[name].append(_one_turn(session, feeds[name]))
    found = {name: median(each) for name, each in times.items()}
    return [
        {
            "model": name, "batch": batch, "threads": threads, "milliseconds": 1000 * seconds,
            "images_per_second": batch / seconds,
            "of_float": seconds / found["float"] if "float" in found else None,
        }
        for name, seconds in found.items()
    ]  # fmt: skip


def _one_turn(session: Any, feed: dict[str, Any]) -> float:
    """The mean seconds of a call, over calls for `ROUND` seconds."""
    started, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < ROUND or not calls:
        session.run(None, feed)
        calls += 1
    return spent / calls


def _session(path: Path, threads: int) -> Any:
    """A session as a program would open it: the runtime's defaults, but for the threads."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def _shown(rows: list[dict[str, Any]], sizes: dict[str, int]) -> list[str]:
    head = ["model", "batch", "threads", "ms", "images/s", "of float"]
    cells = [
        [
            row["model"], str(row["batch"]), str(row["threads"]), f"{row['milliseconds']:.2f}",
            f"{row['images_per_second']:,.0f}", "" if row["of_float"] is None else f"{row['of_float']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    named = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in sizes.items())
    about = _machine()
    return [
        *table([head, *cells], numbers=True), "", f"files: {named}",
        f"ONNX Runtime {about['onnxruntime']}, {about['processor']}; medians of alternating turns",
    ]  # fmt: skip


def _machine() -> dict[str, str]:
    return {
        "onnxruntime": version("onnxruntime"),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
