"""`python -m benchmarks.gpu` gets its minutes on a GPU rarely: whatever breaks it shows here, on the CPU and small."""

import json
from pathlib import Path

from benchmarks import gpu


def test_every_part_of_the_gpu_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    status = gpu.main(["--emulate", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    text = (tmp_path / "gpu.md").read_text()
    assert status == 0, text
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert all(f"## {part}: " in text for part in gpu.PARTS)
