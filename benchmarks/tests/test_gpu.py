"""The GPU's command, rehearsed on the CPU; a part that fails is a row, and the others run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu


def test_a_rehearsal_writes_both_files(tmp_path: Path) -> None:
    assert gpu.main(["--emulate", "--out", str(tmp_path), "--parts", "estimators", "products"]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"estimators", "products"} and all(row["ok"] for row in rows)
    assert "## estimators: " in (tmp_path / "gpu.md").read_text()


def test_a_part_that_fails_is_named_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(bench: gpu.Bench) -> Iterator[gpu.Row]:
        yield {"subject": "first", "ok": True}
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.PARTS, "run", broken)
    assert gpu.main(["--emulate", "--out", str(tmp_path), "--parts", "run", "products"]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "no such kernel" in text and "## products" in text
