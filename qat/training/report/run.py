"""Files of a run, as its report reads them at any time."""

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from qat.training.config.file import flat, parse_yaml
from qat.training.run.folder import ANALYSIS, RESOLVED_CONFIG, SUMMARY
from qat.training.run.logging import CURVES, OF_QUANTIZERS

Points: TypeAlias = list[tuple[int, float]]  # (step, value), in the order of the steps
Curves: TypeAlias = dict[tuple[str, str], Points]  # by run ("qat/train") and tag ("scale/conv1.weight_quantizer")


@dataclass
class ReportedRun:
    """Files of a run; what is missing is empty."""

    path: Path

    def __post_init__(self) -> None:
        self.name = self.path.resolve().name
        self.summary, self.analysis = self.read(SUMMARY), self.read(ANALYSIS)

    def read(self, file: str) -> dict[str, Any]:
        """Read a JSON object from a file of the run; empty if there is none."""
        try:
            found = json.loads((self.path / file).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def curves(self) -> Curves:
        """All curves, without the points that a resumed run has drawn anew."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # that a resumed run hides points is no news
        found: Curves = {}
        top = self.path / CURVES
        for place in sorted({file.parent for file in top.glob("*/*/events.out.tfevents.*")}):
            events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
            for tag in events.Tags()["scalars"]:
                points = {point.step: point.value for point in events.Scalars(tag)}  # the last one of a step counts
                found[place.relative_to(top).as_posix(), tag] = sorted(points.items())
        return found

    @cached_property
    def config(self) -> str:
        file = self.path / RESOLVED_CONFIG
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of the resolved config by their keys, `qat.lr`."""
        return flat(parse_yaml(self.config) or {})

    def by_quantizer(self, kind: str, role: str = "") -> dict[str, Points]:
        """Return the curves of a kind, such as `scale`, by quantizer from input to output.

        `role` leaves only weights or only activations.
        """
        found = {
            (run, tag.partition("/")[2]): points
            for (run, tag), points in self.curves.items()
            if tag.startswith(f"{OF_QUANTIZERS}{kind}/")
        }
        last = max((run for run, _ in found), key=lambda run: (run == "qat/train", run), default="")
        named = {name: points for (run, name), points in found.items() if run == last}
        order = {name: number for number, name in enumerate(self.analysis.get("order", []))}
        weights = {"weight": True, "activation": False}.get(role)
        return {
            name: named[name]
            for name in sorted(named, key=lambda name: order.get(name, len(order)))
            if weights is None or name.endswith("weight_quantizer") == weights
        }
