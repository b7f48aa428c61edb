"""TensorBoard reads the curves."""

from pathlib import Path

from qat.training.run.logging import RunLog
from tests.runs.tiny_training import curves


def test_a_resumed_run_hides_later_points_of_the_stopped_one(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(4):
            log.scalar("loss", 1.0, step)
    with RunLog(tmp_path) as log:
        log.resume(1)
        for step in (2, 3):
            log.scalar("loss", 0.5, step)
    assert curves(tmp_path) == {"loss": [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.5)]}
    assert len({path.name for path in tmp_path.iterdir()}) == 2


def test_a_run_that_starts_anew_hides_the_curves_of_a_failed_start(tmp_path: Path) -> None:
    for anew, value in ((False, 1.0), (True, 0.5)):
        with RunLog(tmp_path, anew) as log:
            log.scalar("loss", value, int(anew))
    assert curves(tmp_path) == {"loss": [(1, 0.5)]}
