"""What the deployment benchmark counts and writes; nothing is timed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import deployment_table
from benchmarks.cifar_resnet import resnet20
from benchmarks.deployment_engines import _answers
from benchmarks.deployment_onnxruntime import written
from benchmarks.deployment_rows import COMPARISON
from benchmarks.speed_rows import keep

FACTS = {"machine": {"processor": "CPU", "flags": [], "threads": 1, "cores": 2}, "versions": {}, "date": "2026-11-26"}


def test_the_float_file_is_the_model() -> None:
    pytest.importorskip("ai_edge_litert")
    from benchmarks.deployment_float_litert import float_file
    from qat.export.litert.engines import TorchFile

    model, images = resnet20().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(TorchFile(float_file(model, images[:1]), "xnnpack")(images)[0], model(images))


def test_the_three_onnx_files_answer_alike(tmp_path: Path) -> None:
    from qat.export.onnxruntime.session import open_session, run_session

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)).eval()
    images = torch.randn(8, 3, 8, 8)
    answers = [run_session(open_session(path), (images,))[0] for path in written(model, images, tmp_path).values()]
    for each in answers[1:]:
        assert (each - answers[0]).abs().max() < 0.1 * answers[0].abs().max()


def test_another_class_that_is_as_likely_is_a_tie() -> None:
    expected = torch.tensor([[1.0, 1.0], [2.0, 1.0], [0.0, 1.0]])
    answers = _answers(expected, torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
    assert answers["equal"] == 1 and answers["ties"] == 1 and answers["top1"] == pytest.approx(100 / 3)


def test_a_table_has_a_line_for_each_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(deployment_table, "RESULT", file)
    for vnni, ratio in ((False, 1.5), (True, 0.5), (False, 1.25)):
        about: dict[str, Any] = {"case": "evaluation", "subject": "net", "batch": 1, "size": 8, "base": "float"}
        rows = [{**about, "variant": "float", "seconds": 1.0}, {**about, "variant": "eval", "ratio": ratio}]
        keep([{**row, "vnni": vnni, **FACTS} for row in rows], file, COMPARISON)
    lines = [line for line in deployment_table.evaluation_table().splitlines() if line.startswith("| net")]
    assert len(lines) == 2 and " 0.50 " in lines[0] and " 1.25 " in lines[1]
