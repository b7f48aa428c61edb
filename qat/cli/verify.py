"""Whether model.onnx answers as the trained model: predictions, integers, and the first layer that differs."""

import argparse
import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

import qat
from qat.cli.runs import Run, add_overrides, add_run, count, open_run
from qat.export import LayerDifference, compare_layers, find_saturation
from qat.export.onnxruntime.default_session import default_is_exact
from qat.text import table
from qat.training.errors import value_errors_reported
from qat.training.run.checkpoint import state_digest
from qat.training.run.proof import MIN_AGREEMENT

EXAMPLE = "python -m qat verify runs/resnet_int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `verify`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument("--batches", type=count, metavar="N", help="validation batches to compare; default: all")
    parser.add_argument("--layers", action="store_true", help="show every layer that differs, not only the first")
    parser.add_argument(
        "--default-session", action="store_true", help="multiply as a session without options does on this processor"
    )


def run(given: argparse.Namespace) -> int:
    """Print what was compared; 1 if predictions differ in more than 0.5 %, or integers beyond near-ties."""
    opened = open_run(given.run_path, given.model)
    batches = FirstBatches(opened.data(given.overrides).val, given.batches)
    model, default = opened.quantized, given.default_session
    with value_errors_reported(f"{opened.onnx}: "):
        found = qat.verify_onnx(opened.onnx, model, batches, default_session=default)
        layers = compare_layers(opened.onnx, model, next(iter(batches))[0], default_session=default)
    differing = [layer for layer in layers if layer.differing]
    top1 = (
        f"; top1 {found.torch_top1:.2f} % in torch, {found.onnx_top1:.2f} % in ONNX Runtime" if found.torch_top1 else ""
    )
    print(f"predictions: {100 * found.agreement:.2f} % of {found.samples:,} are equal{top1}")
    total = sum(layer.elements for layer in layers)
    print(
        f"integers: {sum(layer.differing for layer in layers):,} of {total:,} differ over {len(layers)} layers, each"
        " computed from the same integers before it"
    )
    if differing:
        _say_where(opened, given, next(iter(batches))[0], differing)
    failed = any(layer.beyond_ties for layer in layers) or not found.agreement >= MIN_AGREEMENT
    print("the file is NOT the trained model" if failed else "the file answers as the trained model")
    return int(failed)


def _say_where(opened: Run, given: argparse.Namespace, images: Tensor, differing: list[LayerDifference]) -> None:
    beyond = [layer for layer in differing if layer.beyond_ties]
    first = (beyond or differing)[0]
    cause = probable_cause(opened, first, images, default_session=given.default_session)
    levels = "level" if first.largest == 1 else "levels"
    print(
        f"first layer {'beyond near-ties' if beyond else 'that differs'}: {first.name}, {first.differing:,} of"
        f" {first.elements:,} integers by at most {first.largest} {levels}\nprobable cause: {cause}"
    )
    if given.layers:
        rows = [[each.name, f"{each.differing:,}", f"{each.beyond_ties:,}", str(each.largest)] for each in differing]
        print("\n".join(["", *table([["layer", "differ", "beyond ties", "levels"], *rows], numbers=True)]))


def probable_cause(opened: Run, layer: LayerDifference, images: Tensor, *, default_session: bool) -> str:
    """A sentence on what is behind the differences of the first layer that differs on these images."""
    other = _other_weights(opened)
    if other:
        return other
    if not layer.beyond_ties:
        return (
            "near-ties: float32 sums in another order round a value that lies between two integers to the other one;"
            " any two runtimes do that"
        )
    if default_session and not default_is_exact():
        layers = sum(bool(each.channels) for each in find_saturation(opened.onnx))
        return (
            f"this processor adds pairs of products in 16 bits (no VNNI), where {layers} layers may saturate; compare"
            " without --default-session, and see docs/targets.md for exact sessions and models"
        )
    plain = {each.name: each for each in compare_layers(opened.onnx, opened.quantized, images, optimize=False)}
    if not plain[layer.name].beyond_ties:
        return (
            "an optimisation of ONNX Runtime: without its graph optimisation this layer is equal; try another version"
        )
    return "the file computes this layer otherwise; a rule or operation of your own? If not, please report it"


def _other_weights(opened: Run) -> str:
    """That the file was exported from other weights than the checkpoint has; "" if it was not."""
    if opened.about.get("state_sha256") in (None, state_digest(opened.quantized.state_dict())):
        return ""
    return (
        "the file is of other weights than the checkpoint: it was written before or after them; the command of the run"
        " with resume=auto exports again"
    )


class FirstBatches:
    """The first batches of a loader, every time that it is iterated."""

    def __init__(self, batches: Iterable[Any], count: int | None) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Any:
        return itertools.islice(iter(self.batches), self.count)
