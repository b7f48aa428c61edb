"""Which results are worth a warning."""

import pytest
import torch

from qat.training.config.schema import QATStageConfig, StageConfig
from qat.training.loop.evaluation import Evaluation
from qat.training.loop.stage_warnings import warnings_about


def evaluation(top1: float, most_common: float, count: int) -> Evaluation:
    return Evaluation(top1, 1.0, torch.zeros(count, dtype=torch.int64), count, most_common)


@pytest.mark.parametrize(
    ("top1", "most_common", "count", "warned"),
    [
        (10.0, 10.0, 360, True),
        (12.5, 10.0, 360, True),  # chance plus less than two deviations (1.58 each)
        (13.5, 10.0, 360, False),
        (0.1, 0.1, 50_000, True),
        (0.2, 0.1, 50_000, False),
        (50.0, 50.0, 10, True),
        (90.0, 50.0, 10, False),
        (99.0, 99.0, 1000, True),  # one class nearly always
        (60.0, 60.0, 5, False),  # nothing that five images could show
        (100.0, 60.0, 5, False),
        (100.0, 100.0, 50, False),  # one class only
    ],
)
def test_chance_is_what_one_answer_gives(top1: float, most_common: float, count: int, warned: bool) -> None:
    found = warnings_about("float", StageConfig(epochs=3, lr=1e9), evaluation(top1, most_common, count), None)
    sentence = (
        f"float: val top1 {top1:.2f} % is at chance level: the same answer for all {count} images gives"
        f" {most_common:.2f} %; try a lower float.lr (now 1e+09) or more epochs"
    )
    assert found == ([sentence] if warned else [])


def test_a_stage_that_did_not_train_gets_no_advice_on_training() -> None:
    assert warnings_about("float", StageConfig(epochs=0), evaluation(10.0, 10.0, 360), None) == [
        "float: val top1 10.00 % is at chance level: the same answer for all 360 images gives 10.00 %"
    ]


@pytest.mark.parametrize(("top1", "warned"), [(96.0, False), (94.5, False), (90.0, True)])
def test_worse_than_the_start_is_said_where_it_is_more_than_noise(top1: float, warned: bool) -> None:
    found = warnings_about("qat", QATStageConfig(epochs=3), evaluation(top1, 10.0, 360), 96.0)
    sentence = (
        "qat: val top1 90.00 % is below the 96.00 % that it started from; try a lower qat.lr (now 0.01) or more epochs"
    )
    assert found == ([sentence] if warned else [])
