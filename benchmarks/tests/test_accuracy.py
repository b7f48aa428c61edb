"""What benchmarks.accuracy reads of a finished run."""

import math
from pathlib import Path

from benchmarks.accuracy import last_training_loss
from tests.runs.finished_runs import own_fixture  # noqa: F401


def test_the_training_loss_is_that_of_the_run(own: Path) -> None:
    found = last_training_loss(own / "runs" / "own", steps=4)
    assert 0 < found < 2 * math.log(10)
