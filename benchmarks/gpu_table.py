"""What `benchmarks.gpu` found of training steps, as a table for docs/speed.md."""

import json
from pathlib import Path

from benchmarks.gpu_steps import MODES
from benchmarks.kept import RESULTS, table
from benchmarks.speed_rows import Row

GPU = RESULTS / "gpu.json"
"""Kept of a run of `python -m benchmarks.gpu` on a GPU."""


def gpu_table(results: Path = GPU) -> str:
    """A line a model and precision: a step of float and of the quantized model, as they are and in CUDA graphs."""
    if not results.exists():
        return "Not measured yet.\n"
    about = json.loads(results.read_text())
    steps = [row for row in about["rows"] if row["part"] == "steps" and row["ok"]]
    kinds = [(mode, variant) for mode in MODES for variant in ("float", "qat")]
    lines = []
    for subject in dict.fromkeys((row["subject"], row["precision"], row["batch"]) for row in steps):
        own: dict[tuple[str, str], Row] = {
            (row["mode"], row["variant"]): row
            for row in steps
            if (row["subject"], row["precision"], row["batch"]) == subject
        }
        if own.keys() == set(kinds):
            ratio, peak = (
                own[mode, "qat"][key] / own[mode, "float"][key]
                for mode, key in (("graphs", "seconds"), ("eager", "peak_bytes"))
            )
            cells = [f"{own[kind]['seconds'] * 1e3:.1f} ms" for kind in kinds]
            lines.append([f"{subject[0]}, {subject[1]}, batch {subject[2]}", *cells, f"{ratio:.2f}", f"{peak:.2f}"])
    titles = ["", *(f"{variant}, {mode}" for mode, variant in kinds), "qat / float, graphs", "memory"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    said = f"*memory*: the rise of an eager step, as a share of float's. {about['machine']['gpu']}; {versions}."
    return f"{table(titles, lines, 1)}\n{said}\n"
