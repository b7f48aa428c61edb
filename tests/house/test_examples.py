"""What rarely runs: the files of examples, each in an empty folder, and the benchmark for a GPU, here on the CPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "own_loop.py": [],
    "lightning_module.py": ["lightning"],
    "huggingface_trainer.py": ["transformers", "accelerate"],
    "timm_model.py": ["timm"],
    "ultralytics_yolo.py": ["ultralytics"],
    "ultralytics_trainer.py": ["ultralytics"],
    "libreyolo_trainer.py": ["libreyolo"],
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == NEEDED.keys()


@pytest.mark.parametrize(
    "name", [name if not needed else pytest.param(name, marks=pytest.mark.slow) for name, needed in NEEDED.items()]
)
def test_an_example_trains_and_proves_its_export(name: str, tmp_path: Path) -> None:
    for package in NEEDED[name]:
        if not find_spec(package):
            pytest.skip(f"needs {package}, of the [timm] and [launchers] extras")
    given = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    if said == "0 answers differ by more than ties":
        return
    found = dict(part.split("=") for part in said.removeprefix("Verification(").removesuffix(")").split(", "))
    assert float(found["agreement"]) > 0.99 and float(found["onnx_top1"]) > 90, said
    assert (tmp_path / "model.onnx").stat().st_size > 10_000


def test_every_part_of_the_gpu_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    """It gets its minutes on a GPU rarely: whatever breaks it shows here, small."""
    status = gpu.main(["--emulate", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    text = (tmp_path / "gpu.md").read_text()
    assert status == 0, text
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert all(f"## {part}: " in text for part in gpu.PARTS)
