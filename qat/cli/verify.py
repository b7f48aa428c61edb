"""Compare the file of a run with the trained model: predictions and integers.

It names the first layer that differs, and the probable cause.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import qat
from qat.cli.runs import Run, add_run, count, open_run
from qat.cli.runtimes import RUNTIMES, notes_of, open_file
from qat.export import (
    Differences,
    LayerDifference,
    Verification,
    compare_layers,
    compare_litert_layers,
    explain_differences,
    find_saturation,
)
from qat.export.onnxruntime.session import default_is_exact
from qat.export.ties import allowed_of
from qat.text import plural, table
from qat.training.data.loaders import Batch
from qat.training.errors import UserError, value_errors_reported
from qat.training.run.checkpoint import state_digest

EXAMPLE = "python -m qat verify runs/resnet_int8"
COMPARED = [name for name in RUNTIMES if name != "openvino"]  # which has no comparison by layers here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    parser.add_argument(
        "--runtime", choices=COMPARED, default="onnxruntime", help="default: onnxruntime; others read model.tflite"
    )
    parser.add_argument("--batches", type=count, metavar="N", help="validation batches to compare; default: all")
    parser.add_argument("--layers", action="store_true", help="show every layer that differs, not only the first")
    parser.add_argument(
        "--default-session", action="store_true", help="multiply as a session without options does on this processor"
    )


def run(given: argparse.Namespace) -> int:
    """Print the comparison; return 1 if the file is not the trained model."""
    if given.default_session and RUNTIMES[given.runtime].engine:
        raise UserError(f"--default-session: is of ONNX Runtime; leave it out with --runtime {given.runtime}")
    opened = open_run(given.run_path, given.model)
    batches = FirstBatches(opened.data(given.overrides).val, given.batches)
    path, default = opened.file(given.runtime), given.default_session
    found, layers, behind = compared(
        path, opened.quantized, batches, given.runtime, opened.task.has_classes, default_session=default
    )
    print("\n".join(sentences(found, layers, behind, given.runtime)))
    if differing := [layer for layer in layers if layer.differing]:
        beyond = [layer for layer in differing if _beyond(layer, given.runtime)]
        first = (beyond or differing)[0]
        cause = probable_cause(opened, first, next(iter(batches))[0], given.runtime, default_session=default)
        print(
            f"first layer {'beyond rounding' if beyond else 'that differs'}: {first.name}, {first.differing:,} of"
            f" {first.elements:,} integers by at most {plural(first.largest, 'level')}\nprobable cause: {cause}"
        )
        if given.layers:
            rows = [
                [each.name, f"{each.differing:,}", f"{each.beyond_ties:,}", str(each.largest)] for each in differing
            ]
            print("\n".join(["", *table([["layer", "differ", "beyond ties", "levels"], *rows], numbers=True)]))
    failed = is_other(layers, behind, given.runtime)
    print("the file is NOT the trained model" if failed else "the file answers as the trained model")
    return int(failed)


def compared(
    path: Path,
    model: nn.Module,
    batches: Iterable[Batch],
    runtime: str,
    classes: bool,
    *,
    default_session: bool = False,
) -> tuple[Verification, list[LayerDifference], Differences | None]:
    """Compare answers on all batches, and integers on the first; explain differences."""
    (images, labels), engine = next(iter(batches)), RUNTIMES[runtime].engine
    open_file(path, runtime)  # refuses a file in a sentence
    option: dict[str, Any] = {"engine": engine} if engine else {"default_session": default_session}
    verify, compare = (qat.verify_litert, compare_litert_layers) if engine else (qat.verify_onnx, compare_layers)
    with value_errors_reported(f"{path}: "):
        found, layers = verify(path, model, batches, classes=classes, **option), compare(path, model, images, **option)
        if labels.dim() > 1:  # of masks it is a share of pixels, of those that do not count too
            found = replace(found, torch_top1=None, onnx_top1=None)
        few = allowed_of(found.samples) + 1
        behind = (
            None if found.is_right else explain_differences(path, model, batches, enough=few, classes=classes, **option)
        )
    return found, layers, behind


def sentences(
    found: Verification, layers: list[LayerDifference], behind: Differences | None, runtime: str
) -> list[str]:
    title, first, second = RUNTIMES[runtime].title, found.torch_top1, found.onnx_top1
    top1 = f"; top1 {first:.2f} % in torch, {second:.2f} % in {title}" if first else ""
    differing, total = (sum(getattr(layer, key) for layer in layers) for key in ("differing", "elements"))
    said = [
        f"predictions: {100 * found.agreement:.2f} % of {found.samples:,} are equal{top1}",
        f"integers: {differing:,} of {total:,} differ over {len(layers)} layers, each computed from the same integers"
        " before it",
    ]
    if behind is not None:
        off, what = f"{100 * found.close:.2f} % of the answers have close values", "follow from rounding alone"
        said.insert(1, f"values: {off}; those that are off {'' if behind.explained else 'do not '}{what}")
    return said


def is_other(layers: list[LayerDifference], behind: Differences | None, runtime: str) -> bool:
    return any(_beyond(layer, runtime) for layer in layers) or not (behind is None or behind.explained)


def _beyond(layer: LayerDifference, runtime: str) -> bool:
    # LiteRT may round any sum to the neighbour.
    return layer.largest > 1 if RUNTIMES[runtime].engine else layer.beyond_ties > 0


def probable_cause(
    opened: Run, layer: LayerDifference, images: Tensor, runtime: str = "onnxruntime", *, default_session: bool
) -> str:
    """Return a sentence on why the first differing layer differs on these images."""
    path = opened.file(runtime)
    if notes_of(path).get("state_sha256") not in (None, state_digest(opened.quantized.state_dict())):
        return (
            "the file is of other weights than the checkpoint: it was written before or after them; the command of the"
            " run with resume=auto exports model.onnx again, python -m qat export any other"
        )
    engine = RUNTIMES[runtime].engine
    in_floats = engine == "xnnpack" and not layer.beyond_ties  # XNNPACK scales the sums of products in float
    if engine and not in_floats and not _beyond(layer, runtime):
        return "fixed point: LiteRT's kernels round a sum or an integer on another grid twice, which torch does not"
    if not layer.beyond_ties:
        return (
            "near-ties: float32 sums in another order round a value that lies between two integers to the other one;"
            " any two runtimes do that"
        )
    if default_session and not default_is_exact():
        layers = sum(bool(each.channels) for each in find_saturation(path))
        return (
            f"this processor adds pairs of products in 16 bits (no VNNI), where {layers} layers may saturate; compare"
            " without --default-session, and see docs/targets.md for exact sessions and models"
        )
    # Without optimisation of the graph, only the layers themselves are left to differ.
    plain = [] if engine else compare_layers(path, opened.quantized, images, optimize=False)
    if layer.fused or any(each.name == layer.name and not each.beyond_ties for each in plain):
        fusion = f", a fusion between {' and '.join(layer.fused)}" if layer.fused else ""
        said = "without its graph optimisation this layer is equal; try another version"
        return f"an optimisation of ONNX Runtime{fusion}: {said}"
    return "the file computes this layer otherwise; a rule or operation of your own? If not, please report it"


class FirstBatches:
    """First batches of a loader, every time that it is iterated."""

    def __init__(self, batches: Iterable[Batch], count: int | None) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(iter(self.batches), self.count)
