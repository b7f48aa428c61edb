"""Files of a run, as its report reads them, and sentences about what stands out."""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeAlias

from qat.training.config.file import flat, parse_yaml
from qat.training.run.folder import ANALYSIS, RESOLVED_CONFIG, SENSITIVITY, SUMMARY, Json
from qat.training.run.logging import CURVES, OF_QUANTIZERS
from qat.training.run.report import deviation_of
from qat.training.tasks.known import score_of

Points: TypeAlias = list[tuple[int, float]]  # (step, value), in the order of the steps
Curves: TypeAlias = dict[tuple[str, str], Points]  # by run ("qat/train") and tag ("scale/conv1.weight_quantizer")

SCORED = ("float", "calibrated", "qat")  # keys of the summary


@dataclass
class ReportedRun:
    """Files of a run; what is missing is empty."""

    path: Path

    def __post_init__(self) -> None:
        self.name = self.path.resolve().name
        self.summary, self.analysis = self.read(SUMMARY), self.read(ANALYSIS)

    def read(self, file: str) -> Json:
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
    def settings(self) -> Json:
        """The values of the resolved config by their keys, `qat.lr`."""
        return flat(parse_yaml(self.config) or {})

    @cached_property
    def classes(self) -> dict[str, tuple[float, ...]]:
        """Scores of each class by the models of `SCORED`, the largest loss first."""
        found = [self.summary.get(key, {}).get("by_class", {}) for key in SCORED]
        rows = [(name, tuple(each.get(name) for each in found)) for name in found[0]]
        known = [(name, row) for name, row in rows if None not in (row[0], row[-1])]
        return dict(sorted(known, key=lambda each: each[1][-1] - each[1][0]))

    def by_quantizer(self, kind: str, role: str = "") -> dict[str, Points]:
        """Return the curves of a kind, such as `scale`, by quantizer, input to output."""
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


# Limits beyond which something is named.
FAR = 2.0  # factor by which a scale has moved away from its calibration
JUMP = 0.5  # power of two by which a scale moved between two points of its curve; healthy ones move by percents
LAG = 0.25  # deviations; the statistics of settled BatchNorms are within 0.1 of the batches'
CLIPPED = 0.05  # share of the values
CLASS = 5.0  # points that a class loses
LEVELS = 0.25  # share of the levels that occur, at 8 bits
TURNING = 0.05  # share of the weights that turn round
WAITING = 0.3  # share of the time spent waiting for data
AT_FLOOR = 0.1  # share of a tensor's scales on their floor; of many channels, a few are dead in float too
FEW_BITS = 4  # below this, much is clipped, and rightly so
HURT = 25.0  # dB: with more left, clipping is by a level or so, as of black pixels at the end of the range
BEHIND = 12.0  # dB below the median of all layers: two bits
MOST_BITS = 8  # of a target's kernels
DB_A_BIT = 6.0  # cost of each bit less
SHARE = 0.1  # of the whole cost that a layer has in `sensitivity`
RATES = ("qat.quantizer_lr_factor", "qat.quantizer_lr")


def findings(run: ReportedRun) -> list[str]:
    """Return the sentences, the gravest first."""
    first = [] if run.summary else ["The run is not finished: what follows is what it has drawn so far."]
    if run.summary.get("problem"):
        first.append(f"The file is not the trained model: {run.summary['problem']}.")
    sick = [*_scales(run), *_statistics(run)]  # which show in tensors and layers too
    return [*first, *sick, *_summary(run), *(() if sick else [*_tensors(run), *_layers(run)])]


def _summary(run: ReportedRun) -> Iterator[str]:
    yield from (f"{warning}." for warning in run.summary.get("warnings", []))
    before, after = (score_of(run.summary.get(key, {})) for key in ("float", "qat"))
    name, scores = next(iter(run.classes.items()), ("", (0.0, 0.0)))
    if scores[0] - scores[-1] > CLASS:
        yield f"Of all classes, {name!r} loses most from float to QAT: {scores[0]:.1f} % become {scores[-1]:.1f} %."
    images = run.summary.get("val_images")
    if images and before is not None and after is not None:
        noise = math.hypot(deviation_of(before, images), deviation_of(after, images))
        if before - after > noise:
            yield (
                f"QAT ends {before - after:.1f} points below the float model, more than chance explains"
                f" (±{noise:.1f} on {images:,} images)."
            )


def _scales(run: ReportedRun) -> Iterator[str]:
    if resting := {name: share for name, share in _last(run, "at_floor").items() if share > AT_FLOOR}:
        yield (
            f"Scales have collapsed onto their floor in {_named(resting)}: all but small values are clipped there;"
            " lower qat.lr or the rate of the scales, or calibrate on more images."
        )
    curves = run.by_quantizer("scale")
    moved = {name: abs(math.log2(max(value, 1e-6))) for name, value in _last(run, "scale").items()}
    powers = {name: [0.0, *(math.log2(max(each, 1e-6)) for _, each in points)] for name, points in curves.items()}
    jumps = {name: max(abs(b - a) for a, b in pairwise(values)) for name, values in powers.items()}
    gone = {name for name in moved if moved[name] > math.log2(FAR) or jumps[name] > JUMP} - resting.keys()
    far = {name: moved[name] for name in moved if name in gone}
    if far:
        given = next((key for key in RATES if run.settings.get(key) is not None), None)
        other = f"leave {given} out, or lower it" if given else f"lower qat.lr, or set {RATES[0]} below its default"
        yield (
            f"{len(far)} of {len(curves)} scales moved by more than a factor of {FAR:g}, or by half between two points"
            f" ({_named(far)}; the first by {2 ** max(far.values()):.3g}), while healthy ones move by percents: the"
            f" rate of the scales is too high; {other}."
        )


def _statistics(run: ReportedRun) -> Iterator[str]:
    if lag := {name: value for name, value in run.analysis.get("batch_norm", {}).items() if value > LAG}:
        more = "set qat.bn_reestimate: always, or " * (run.settings.get("qat.bn_reestimate") != "always")
        yield (
            f"The running statistics of {len(lag)} BatchNorms are not those of the training batches ({_named(lag)}):"
            f" evaluation computes another function than training; {more}train longer."
        )


def _tensors(run: ReportedRun) -> Iterator[str]:
    last = {kind: _last(run, kind) for kind in ("clipped_low", "clipped_high", "levels", "oscillating")}
    clipped = {name: low + last["clipped_high"].get(name, 0) for name, low in last["clipped_low"].items()}
    bits, sqnr = run.analysis.get("bits", {}), _last(run, "sqnr")
    hurt = {name for name in clipped if bits.get(name, 8) >= FEW_BITS and sqnr.get(name, 0) < HURT}
    inits = {run.settings.get(f"quantization.{tensor}.init") for tensor in ("weight", "activation")}
    init = ", or with init: minmax" * (inits != {"minmax"})
    freeze = "try qat.oscillation with freeze, or " * (run.settings.get("qat.oscillation.freeze") is None)
    if much := {name: clipped[name] for name in hurt if clipped[name] > CLIPPED}:
        yield (
            f"More than {100 * CLIPPED:.0f} % of the values are clipped in {_named(much)}: the range is too narrow;"
            f" calibrate on more images{init}."
        )
    if few := {name: -share for name, share in last["levels"].items() if share < LEVELS}:
        yield (
            f"Less than {100 * LEVELS:.0f} % of the levels occur in {_named(few)}: a few large values stretch the"
            " range, or the tensor is nearly constant."
        )
    if turning := {name: share for name, share in last["oscillating"].items() if share > TURNING}:
        yield (
            f"More than {100 * TURNING:.0f} % of the weights still turn round at the end in {_named(turning)}:"
            f" {freeze}a lower rate at the end."
        )
    waited = [value for (name, tag), points in run.curves.items() if tag == "data_wait" for _, value in points]
    if waited and median(waited) > WAITING:
        yield f"Training waits for data {100 * median(waited):.0f} % of the time: more data.workers, or smaller images."


def _layers(run: ReportedRun) -> Iterator[str]:
    local = {row["name"]: row["local"] for row in run.analysis.get("layers", []) if row["local"] is not None}
    if len(local) < 3:
        return
    bits = {row["name"]: min(row["weight_bits"], row["activation_bits"]) for row in run.analysis.get("cost", [])}
    measured = run.read(SENSITIVITY)
    rows = {row["name"]: row for row in measured.get("layers", [])}
    middle = median(local.values())
    behind = {
        name: middle - value for name, value in local.items()
        if middle - value > BEHIND and value < HURT - DB_A_BIT * (MOST_BITS - bits.get(name, MOST_BITS))
        and (name not in rows or stands_out(measured, rows[name]))
    }  # fmt: skip
    low = {name: lost for name, lost in behind.items() if bits.get(name, MOST_BITS) < MOST_BITS}
    rest = {name: lost for name, lost in behind.items() if name not in low}
    for found, advice in ((low, "give more bits there ("), (rest, "at 8 bits what is left is float (skip: true in ")):
        if found:
            yield (
                f"{_named(found)} lose{'s' if len(found) == 1 else ''} more than {BEHIND:.0f} dB beyond the other"
                f" layers: {advice}quantization.overrides); python -m qat sensitivity says what that gains."
            )


def change_of(result: Json, row: Json, side: str, part: str) -> tuple[float, float, bool]:
    """Return changes of top-1 and loss, and True if the loss exceeds noise."""
    reference, score = {"only": "float", "all_but": "baseline"}[side], row[side][part]
    top1, loss = (score[key] - result[reference][key] for key in ("top1", "loss"))
    return top1, loss, abs(loss) > score[f"noise_to_{reference}"]


def stands_out(result: Json, row: Json) -> bool:
    """Return True if quantizing a layer alone hurts, and sparing it alone helps."""
    # Both beyond noise, and the latter gives back at least `SHARE` of what quantization costs in all.
    least = SHARE * (result["baseline"]["loss"] - result["float"]["loss"])
    (_, worse, alone), (_, better, without) = (change_of(result, row, side, "both") for side in ("only", "all_but"))
    return alone and without and worse > 0 and -better > max(least, 0)


def _last(run: ReportedRun, kind: str) -> dict[str, float]:
    return {name: points[-1][1] for name, points in run.by_quantizer(kind).items()}


def _named(found: dict[str, float], most: int = 3) -> str:
    names = sorted(found, key=lambda name: -found[name])
    return f"{', '.join(names[:most])}{f' and {len(names) - most} more' if len(names) > most else ''}"
