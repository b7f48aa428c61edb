"""What the engine's proof of itself costs: once a model, at the end of `calibrate` (`qat.codes.check.judging`).

python -m benchmarks.self_check              # each model in a process of its own; keeps results/self_check.json
python -m benchmarks.document                # writes the table into docs/speed.md
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torchvision

import qat
from qat.codes.graph import FusedGraph
from qat.kernels.cpu import onednn

OUT = Path(__file__).resolve().parent / "results" / "self_check.json"
CASES = {"resnet18": (16, 112), "mobilenet_v2": (16, 112), "vit_b_16": (8, 224)}
"""Model: batch and size of the images."""

ROUNDS = 5


def main() -> None:
    """Measure all, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES)
    chosen = parser.parse_args().model
    if chosen is not None:
        print(json.dumps(measured(chosen)))
        return
    command = [sys.executable, "-m", "benchmarks.self_check", "--model"]
    rows = [json.loads(subprocess.check_output([*command, name], text=True).splitlines()[-1]) for name in CASES]
    found = {
        "processor": f"{platform.machine()}, {'VNNI' if onednn.are_exact('dense') else 'no VNNI'}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": rows,
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")


def measured(name: str) -> dict[str, object]:
    """Seconds of a check and of a step, medians, and how far a check raises the most memory of the process."""
    batch, size = CASES[name]
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(num_classes=10).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    model = qat.prepare(net, example_inputs=images[:2])
    qat.calibrate(model, [images])
    assert isinstance(model, FusedGraph)
    model.train()
    steps, checks = [], []
    step(model, images)
    before = most_memory()
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        step(model, images)
        steps.append(time.perf_counter() - begin)
        model._verdicts.clear()
        model._engine_state.fused = None
        begin = time.perf_counter()
        verdict = model._self_check(images)
        checks.append(time.perf_counter() - begin)
        assert verdict is not None and not verdict.reason, verdict
    return {
        "model": f"{name}, batch {batch}, {size} px",
        "check_seconds": statistics.median(checks),
        "step_seconds": statistics.median(steps),
        "more_memory_bytes": most_memory() - before,
    }


def step(model: torch.nn.Module, images: torch.Tensor) -> None:
    """A training step without an optimizer."""
    model(images).square().mean().backward()
    model.zero_grad()


def most_memory() -> int:
    """The most resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def self_check_table() -> str:
    """The kept result in Markdown."""
    found = json.loads(OUT.read_text())
    lines = ["| model | self-check | a training step | more memory than a step takes |", "|---|---:|---:|---:|"]
    for row in found["rows"]:
        check, one, more = row["check_seconds"], row["step_seconds"], row["more_memory_bytes"]
        lines.append(f"| {row['model']} | {check:.2f} s | {one:.2f} s | {more / 1e6:.0f} MB |")
    return "\n".join([*lines, "", f"{found['processor']}, {found['threads']} threads, torch {found['torch']}"]) + "\n"


if __name__ == "__main__":
    main()
