"""The export at the end of a run: the file, its proof, and exact sums where the proof asks for them."""

import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, fx

import qat
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run.exit_status import is_memory_shortage
from qat.training.run.files import replacing
from qat.training.run.logging import RunLog
from qat.training.run.proof import Proof, prove

logger = logging.getLogger("qat")


def export_and_prove(
    model: fx.GraphModule,
    path: Path,
    example: Tensor,
    batches: Iterable[Any],
    config: RunConfig,
    metadata: Mapping[str, Any],
    log: RunLog,
) -> Proof:
    """Write the model, run it over the batches, and compare predictions and integers.

    With `export.exact_sums: auto`, if predictions differ and ONNX Runtime adds integers, a second file adds in float32
    as torch does; it takes the first one's place if more of its predictions are the model's.
    """
    wanted = config.export.exact_sums
    with replacing(path) as temporary:
        _write(model, temporary, example, metadata, wanted == "always", config)
    proof = prove(path, model, batches)
    if wanted != "auto" or proof.results["agreement"] == 1 or "QLinearAdd" not in proof.results["operators"]:
        return proof
    with tempfile.TemporaryDirectory(prefix="qat_exact_sums_") as folder:
        second = Path(folder) / path.name
        _write(model, second, example, metadata, True, config)
        exact = prove(second, model, batches)
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
    model: fx.GraphModule, path: Path, example: Tensor, metadata: Mapping[str, Any], exact_sums: bool, config: RunConfig
) -> None:
    try:
        wanted = config.export
        qat.export_onnx(
            model, path, example, metadata=metadata, exact_sums=exact_sums, packed=wanted.packed, opset=wanted.opset
        )
    except Exception as error:  # the exporter has its own types
        if isinstance(error, OSError) or is_memory_shortage(error):
            raise
        logger.debug("export: the exporter's error", exc_info=True)
        details = " ".join(str(error).split())[:200]
        raise UserError(
            f"export: {config.model.name} could not be exported ({type(error).__name__}: {details});"
            " resume=auto tries again, export.onnx=false goes without"
        ) from error
