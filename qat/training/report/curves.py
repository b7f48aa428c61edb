"""The curves of a run folder, read from TensorBoard's files."""

from pathlib import Path
from typing import TypeAlias

from qat.training.run.logging import CURVES

Points: TypeAlias = list[tuple[int, float]]
"""(step, value), in the order of the steps."""

Curves: TypeAlias = dict[tuple[str, str], Points]
"""By run ("qat/train") and tag ("scale/conv1.weight_quantizer")."""


def read_curves(folder: Path) -> Curves:
    """Every curve, without the points that a resumed run has drawn anew."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curves = {}
    for place in sorted({file.parent for file in (folder / CURVES).glob("*/*/events.out.tfevents.*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            points = {point.step: point.value for point in events.Scalars(tag)}  # the last one of a step counts
            found[place.relative_to(folder / CURVES).as_posix(), tag] = sorted(points.items())
    return found
