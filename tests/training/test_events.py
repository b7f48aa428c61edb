"""TensorBoard reads the curves."""

from pathlib import Path

from qat.training.run.logging import RunLog
from tests.runs.tiny_training import curves


def test_a_resumed_stage_hides_later_points_of_the_stopped_one_and_no_others(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(4):
            log.scalars("float", "train", {"loss": 1.0}, step)
            log.scalars("qat", "val", {"loss": 1.0}, step)
    with RunLog(tmp_path) as log:
        log.begin("qat", 2)
        for step in (2, 3):
            log.scalars("qat", "val", {"loss": 0.5}, step)
    assert curves(tmp_path) == {
        "float/train/loss": [(step, 1.0) for step in range(4)],
        "qat/val/loss": [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.5)],
    }
    assert len(list((tmp_path / "curves" / "qat" / "val").iterdir())) == 2


def test_a_stage_that_starts_anew_hides_the_curves_of_a_failed_start(tmp_path: Path) -> None:
    for step, value in ((0, 1.0), (5, 1.0), (3, 0.5)):
        with RunLog(tmp_path) as log:
            log.begin("float", 0)
            log.scalars("float", "train", {"loss": value}, step)
    assert curves(tmp_path) == {"float/train/loss": [(3, 0.5)]}
