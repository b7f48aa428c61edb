"""Answers on images: what is drawn where, and the images on which two models differ most."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qat.training.config.schema import DataConfig
from qat.training.data.loaders import load_data
from qat.training.report.drawing import difference, draw, draw_answers
from qat.training.tasks.detection import Detection
from qat.training.tasks.labels import IGNORED
from tests.runs.tiny_training import CPU


def boxes(*rows: tuple[int, float, list[float]]) -> dict[str, torch.Tensor]:
    labels, scores, sides = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "labels": torch.tensor(labels, dtype=torch.long),
        "scores": torch.tensor(scores),
        "boxes": torch.tensor(sides).reshape(-1, 4),
    }


def test_masks_cover_their_classes_alone() -> None:
    mask = torch.tensor([[0, 1, 1], [IGNORED, 2, 0]])
    drawn = draw(torch.full((3, 4, 6), 100, dtype=torch.uint8), mask, [])
    changed = (drawn != 100).any(0)
    assert changed[::2, ::2].tolist() == [[False, True, True], [False, True, False]]
    assert not torch.equal(drawn[:, 0, 2], drawn[:, 2, 2]) and torch.equal(drawn[:, 0, 2], drawn[:, 1, 5])


def test_masks_differ_by_the_share_of_pixels() -> None:
    one, two = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)
    two[1, :3] = 2
    assert difference(one, two) == pytest.approx(15.0)


def test_boxes_lie_where_they_are_and_one_of_a_class_without_a_name_too() -> None:
    black = torch.zeros(3, 60, 60, dtype=torch.uint8)
    drawn = draw(black, boxes((7, 0.9, [10.0, 5.0, 29.0, 28.0])), ["background", "cat"], scale=2)
    rows, columns = drawn.amax((0, 2)).nonzero(), drawn.amax((0, 1)).nonzero()
    assert [int(x) for x in (rows.min(), rows.max(), columns.min(), columns.max())] == [10, 56, 20, 58]
    assert torch.equal(draw(black, boxes(), []), black)


SQUARE = [0.0, 0.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (boxes((1, 0.5, [0.0, 0.0, 10.0, 6.0])), 0),
        (boxes((1, 0.5, [0.0, 0.0, 10.0, 5.0])), 2),
        (boxes((2, 0.9, SQUARE)), 2),
        (boxes((1, 0.9, SQUARE), (2, 0.9, SQUARE)), 1),
        (boxes(), 1),
    ],
)
def test_boxes_differ_without_a_partner(other: Any, count: int) -> None:
    one = boxes((1, 0.9, SQUARE))
    assert difference(one, other) == difference(other, one) == count


class Given(Detection):
    """Boxes that a model returns."""

    def answers(self, output: Any, images: torch.Tensor) -> Any:
        return output

    def boxes(self, answers: Any) -> Any:
        return answers


def test_images_come_in_the_order_of_what_differs(tmp_path: Path) -> None:
    config = DataConfig(name="canvases", image_size=32, limit_val=9, limit_train=2, batch_size=2)
    data = load_data(config, 0, CPU, channels_last=False, kind="boxes")
    order = {image.numpy().tobytes(): number for number, image in enumerate(torch.cat([x for x, _ in data.val]))}

    def model(images: torch.Tensor) -> Any:  # image k has k boxes, and one of too low a score
        numbers = [order[image.numpy().tobytes()] for image in images]
        return [boxes((1, 0.4, SQUARE), *[(1, 0.5, SQUARE)] * number) for number in numbers]

    def nothing(images: torch.Tensor) -> Any:
        return [boxes() for _ in images]

    found = draw_answers(tmp_path / "answers.png", {"float": nothing, "QAT": model}, data, Given())
    assert found == {"columns": ["truth", "float", "QAT"], "differing": [8, 7, 6, 5, 4, 3], "unit": "boxes differ"}
    with Image.open(tmp_path / "answers.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape == (6 * 226 + 2, 3 * 226 + 2, 3)
    truth, plain, boxed = (pixels[2:226, 2 + 226 * column : 226 + 226 * column] for column in range(3))
    assert (truth != plain).any() and (plain[72:] == boxed[72:]).all() and (plain[:72, :72] != boxed[:72, :72]).any()
