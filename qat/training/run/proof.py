"""The proof at the end of a run: a comparison of the exported file with the model, with exact products and in the
runtime's default session."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

import qat
from qat.export import LayerDifference, Saturation, compare_layers, find_saturation, optimized_operators
from qat.export.onnxruntime.default_session import default_is_exact, needs_option
from qat.text import table
from qat.training.errors import UserError
from qat.training.run.report import onnx_results, session_results

MIN_AGREEMENT = 0.995
"""Share of equal predictions below which the proof fails."""

FLOAT_OPERATORS = ("Conv", "FusedConv", "ConvTranspose", "Gemm", "MatMul", "FusedGemm", "FusedMatMul")

WAYS_OUT = (
    "exact are a session with session.x64quantprecision=1 in its options, and a model that cannot saturate"
    " (quantization.target=onnxruntime_x86)"
)


@dataclass(frozen=True)
class Proof:
    """The results of the comparison.

    Attributes:
        results: the `onnx` section of summary.json.
        layers: the differences of every layer's integers, with exact products.
        saturation: which layers may saturate in 16-bit sums.
    """

    results: dict[str, Any]
    layers: list[LayerDifference]
    saturation: list[Saturation]

    def problems(self) -> list[str]:
        """The reasons why the proof fails, as parts of one sentence; empty if it does not."""
        found = []
        if not self.results["agreement"] >= MIN_AGREEMENT:
            found.append(f"only {100 * self.results['agreement']:.2f} % of its predictions are the torch model's")
        wrong = [layer.name for layer in self.layers if layer.largest > 1]
        if wrong:
            found.append(f"its integers differ by more than one level in {len(wrong)} layers ({wrong[0]} first)")
        return found

    def sentences(self) -> list[str]:
        """The lines for the log."""
        most = next(iter(self.results["layers"]["most_differing"].items()), None)
        lines = [f"ONNX Runtime: {_answers(self.results)}" + (f", {most[1]:,} of them in {most[0]}" if most else "")]
        operators = self.results["operators"]
        left = ", ".join(f"{operators[name]} {name}" for name in FLOAT_OPERATORS if name in operators)
        if left:
            lines.append(f"ONNX Runtime computes these in float: {left}; layers.txt says which layers stay float")
        default, layers = self.results.get("default_session"), self.results["saturation"]["layers"]
        if default and layers:
            lines.append(
                "ONNX Runtime's default session adds pairs of products in 16 bits on this processor (no VNNI), where"
                f" {layers} of {len(self.saturation)} layers may saturate: {_answers(default)}; {WAYS_OUT}"
            )
        return lines

    def saturation_table(self) -> str:
        """The table for layers.txt of the layers that may saturate in 16-bit sums."""
        layers = self.results["saturation"]["layers"]
        if not layers:
            return "sums of two products fit 16 bits in every layer: exact on x86 without VNNI in any session"
        rows = [["layer", "channels", "may saturate", "largest sum"]] + [
            [each.layer, f"{len(each.sums):,}", f"{len(each.channels):,}", f"{each.largest:,}"]
            for each in self.saturation
        ]
        head = f"{layers} layers may saturate where two products are added in 16 bits (x86 without VNNI):"
        return "\n".join([f"{head} {WAYS_OUT}", "", *table(rows, numbers=True)])


def prove(path: Path, model: fx.GraphModule, batches: Iterable[Any]) -> Proof:
    """Run the file of `export_onnx` over the batches, (images, labels), and compare it with the exported model.

    Predictions are compared on all batches, every layer's integers on the first; they are iterated several times.

    Raises:
        UserError: if ONNX Runtime has no session with exact products on this machine.
    """
    try:
        needs_option()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}; export.onnx=false goes without the proof") from error
    saturation = find_saturation(path)
    images = next(iter(batches))[0]
    layers = compare_layers(path, model, images)
    results = onnx_results(
        qat.verify_onnx(path, model, batches), layers, dict(optimized_operators(path)), path.stat().st_size, saturation
    )
    if not default_is_exact():
        results["default_session"] = session_results(
            qat.verify_onnx(path, model, batches, default_session=True),
            compare_layers(path, model, images, default_session=True),
        )
    return Proof(results, layers, saturation)


def _answers(found: dict[str, Any]) -> str:
    top1 = "" if found["top1"] is None else f"val top1 {found['top1']:.2f} %, "
    layers = found["layers"]
    return (
        f"{top1}{100 * found['agreement']:.2f} % equal predictions;"
        f" {layers['differing']:,} of {layers['elements']:,} integers differ over {layers['compared']} layers"
    )
