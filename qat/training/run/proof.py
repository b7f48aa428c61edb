"""Export at the end of a run, and its proof against the model."""

import logging
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, fx

import qat
from qat.export import (
    Differences,
    LayerDifference,
    Saturation,
    Verification,
    compare_layers,
    explain_differences,
    find_saturation,
    optimized_operators,
)
from qat.export.agreement import MIN_AGREEMENT
from qat.export.onnxruntime.session import default_is_exact, needs_option, open_session, run_session
from qat.export.ties import allowed_of
from qat.quantizer.training import scales_at_minimum
from qat.text import table
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.loop.evaluation import evaluate
from qat.training.loop.stage import Batches
from qat.training.run.exit_status import is_memory_shortage
from qat.training.run.folder import Json, replacing
from qat.training.run.logging import RunLog
from qat.training.tasks.known import CLASSIFICATION, score_of, task_in
from qat.training.tasks.task import Task

logger = logging.getLogger("qat")

FLOAT_OPERATORS = ("Conv", "FusedConv", "ConvTranspose", "Gemm", "MatMul", "FusedGemm", "FusedMatMul")
MOST_DIFFERING = 3  # layers in the summary, with their counts of differing integers

WAYS_OUT = (
    "exact are a session with session.x64quantprecision=1 in its options, and a model that cannot saturate"
    " (quantization.target=onnxruntime_x86)"
)


@dataclass(frozen=True)
class Proof:
    """Results of the comparison, with exact products."""

    results: Json
    layers: list[LayerDifference]
    saturation: list[Saturation]
    differences: Differences | None = None  # causes of differing predictions, if too few are equal
    collapsed: frozenset[str] = frozenset()  # quantizers of activations whose scale rests on its floor

    def problems(self) -> list[str]:
        """Return the reasons why the proof fails, as parts of one sentence."""
        found = []
        shares = {
            "of its predictions are the torch model's": self.results["agreement"],
            "of its answers have values that are the torch model's": self.results["close"],
        }
        few = [f"{100 * share:.2f} % {what}" for what, share in shares.items() if not share >= MIN_AGREEMENT]  # or NaN
        if few and not (self.differences and self.differences.explained):
            found.append(f"only {few[0]}, and near-ties of rounding do not explain the others ({self._largest_gap()})")
        wrong = [layer.name for layer in self.layers if layer.largest > 1]
        if wrong:
            count = "1 layer" if len(wrong) == 1 else f"{len(wrong)} layers"
            found.append(f"its integers differ by more than one level in {count} ({wrong[0]} first)")
            collapsed = [name for name in wrong if name in self.collapsed]
            if collapsed:
                found.append(
                    f"the grid of {collapsed[0]} collapsed: its scale rests on its floor, where float32 rounding of"
                    " large values is more than a level (a lower qat.lr keeps it, or a better float model)"
                )
        return found

    def problem(self) -> str:
        """Return the reasons as one sentence about model.onnx; "" if the proof holds."""
        problems = " and ".join(self.problems())
        return problems and f"{problems}; do not deploy it: docs/run_folder.md says what now (Exit status 1)"

    def warnings(self) -> list[str]:
        """Return warnings to print although the proof holds."""
        differences = self.differences
        if differences is None or self.results["agreement"] >= MIN_AGREEMENT or self.problems():
            return []
        most = max(differences.layers, key=lambda layer: layer.differing).name
        count, total = (sum(getattr(each, key) for each in differences.layers) for key in ("differing", "elements"))
        return [
            f"onnx: {differences.differing:,} of {differences.predictions:,} predictions are not the torch model's,"
            f" because of near-ties: in their batches {count:,} of {total:,} integers (most in {most}) were rounded"
            f" to the neighbour, and torch goes on from them to the same answers ({self._largest_gap()});"
            f" this model makes another class of a rounding, on any runtime: docs/run_folder.md says"
            " how to make it steadier (Exit status 1)"
        ]

    def _largest_gap(self) -> str:
        gap = self.results["max_logit_difference"]
        return "a logit is not finite" if gap is None else f"largest difference of a logit {gap:.3g}"

    def sentences(self) -> list[str]:
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
        """Return the table for layers.txt of layers that may saturate in 16-bit sums."""
        layers = self.results["saturation"]["layers"]
        if not layers:
            return "sums of two products fit 16 bits in every layer: exact on x86 without VNNI in any session"
        cells = [(each.layer, len(each.sums), len(each.channels), each.largest) for each in self.saturation]
        rows = [["layer", "channels", "may saturate", "largest sum"]]
        rows += [[name, *(f"{number:,}" for number in numbers)] for name, *numbers in cells]
        head = f"{layers} layers may saturate where two products are added in 16 bits (x86 without VNNI):"
        return "\n".join([f"{head} {WAYS_OUT}", "", *table(rows, numbers=True)])


def prove(path: Path, model: fx.GraphModule, batches: Batches, task: Task = CLASSIFICATION) -> Proof:
    """Compare predictions on all batches, integers on the first; explain differences."""
    try:
        needs_option()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}; export.onnx=false goes without the proof") from error
    saturation = find_saturation(path)
    images = next(iter(batches))[0]
    layers = compare_layers(path, model, images)
    found = qat.verify_onnx(path, model, batches, classes=task.has_classes)
    results = onnx_results(found, layers, optimized_operators(path), path.stat().st_size, saturation)
    differences = None
    if not found.is_right:
        differences = explain_differences(
            path, model, batches, enough=allowed_of(found.samples) + 1, classes=task.has_classes
        )
        counts = {key: getattr(differences, key) for key in ("predictions", "differing", "unexplained")}
        results["differences"] = {**counts, "integers": _integers_results(differences.layers)}
    if not default_is_exact():
        results["default_session"] = session_results(
            qat.verify_onnx(path, model, batches, default_session=True, classes=task.has_classes),
            compare_layers(path, model, images, default_session=True),
        )
    if task.metric not in results:
        sessions = {True: results, False: results.get("default_session")}
        for exact, answered in ((exact, each) for exact, each in sessions.items() if each):
            run = partial(run_session, open_session(path, exact=exact))
            answered[task.metric] = evaluate(model, batches, torch.device("cpu"), forward=run, task=task).score
            del answered["top1"]
    resting = frozenset(name for name, (count, learned) in scales_at_minimum(model).items() if count == learned)
    return Proof(results, layers, saturation, differences, resting)


def onnx_results(
    found: Verification, layers: list[LayerDifference], operators: Mapping[str, int], size: int, sums: list[Saturation]
) -> Json:
    channels = [len(each.channels) for each in sums]
    return {
        **session_results(found, layers),
        "size_bytes": size,
        "operators": dict(sorted(operators.items())),
        "saturation": {"layers": sum(map(bool, channels)), "channels": sum(channels)},
    }


def session_results(found: Verification, layers: list[LayerDifference]) -> Json:
    return {
        "top1": found.onnx_top1,
        "agreement": found.agreement,
        "close": found.close,
        "max_logit_difference": found.max_difference if math.isfinite(found.max_difference) else None,
        "layers": _integers_results(layers),
    }


def _integers_results(layers: list[LayerDifference]) -> Json:
    most = sorted(layers, key=lambda layer: -layer.differing)[:MOST_DIFFERING]
    return {
        "compared": len(layers),
        **{key: sum(getattr(layer, key) for layer in layers) for key in ("elements", "differing", "beyond_ties")},
        "largest_difference": max((layer.largest for layer in layers), default=0),
        "most_differing": {layer.name: layer.differing for layer in most if layer.differing},
    }


def _answers(found: Json) -> str:
    score = score_of(found)
    said = "" if score is None else f"val {task_in(found).title} {score:.2f} %, "
    integers = "{differing:,} of {elements:,} integers differ over {compared} layers".format(**found["layers"])
    return f"{said}{100 * found['agreement']:.2f} % equal predictions; {integers}"


def export_and_prove(
    model: fx.GraphModule,
    path: Path,
    example: Tensor,
    batches: Batches,
    config: RunConfig,
    metadata: Json,
    log: RunLog,
) -> Proof:
    """Write the model, run it over the batches, and compare it with the file.

    With `export.exact_sums: auto`, if predictions differ and ONNX Runtime adds integers, a second file adds in float32
    as torch does. It replaces the first one if more of its predictions are the model's.
    """
    wanted = config.export.exact_sums
    with replacing(path) as temporary:
        _write(model, temporary, example, metadata, wanted == "always", config)
    proof = prove(path, model, batches, config.task)
    if wanted != "auto" or proof.results["agreement"] == 1 or "QLinearAdd" not in proof.results["operators"]:
        return proof
    with tempfile.TemporaryDirectory(prefix="qat_exact_sums_") as folder:
        second = Path(folder) / path.name
        _write(model, second, example, metadata, True, config)
        exact = prove(second, model, batches, config.task)
        shares = tuple(f"{100 * each.results['agreement']:.2f} %" for each in (proof, exact))
        if exact.results["agreement"] <= proof.results["agreement"]:
            log.say(f"export: sums stay integer ones: {shares[0]} equal predictions, {shares[1]} with exact sums")
            return proof
        with replacing(path) as temporary:
            shutil.copyfile(second, temporary)
    log.say(
        f"export: sums are added in float32, as torch adds them: ONNX Runtime's integer sums gave {shares[0]} equal"
        f" predictions, these give {shares[1]}; export.exact_sums=never keeps the faster ones"
    )
    return exact


def _write(
    model: fx.GraphModule, path: Path, example: Tensor, metadata: Json, exact_sums: bool, config: RunConfig
) -> None:
    options = config.export.model_dump(include={"packed", "opset", "dynamic"})
    try:
        qat.export_onnx(model, path, example, metadata=metadata, exact_sums=exact_sums, **options)
    except Exception as error:  # the exporter has its own types
        if isinstance(error, OSError) or is_memory_shortage(error):
            raise
        logger.debug("export: the exporter's error", exc_info=True)
        details = " ".join(str(error).split())[:200]
        raise UserError(
            f"export: {config.model.name} could not be exported ({type(error).__name__}: {details});"
            " resume=auto tries again, export.onnx=false goes without"
        ) from error
