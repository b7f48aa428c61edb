"""Write the integer model of a run to a file of your own, and prove it; the run folder stays as it is."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import fx

import qat
from qat.cli.runs import Run, add_overrides, add_run, check_folder_of, in_torch, open_run
from qat.export.onnx.operators import OPSET, OPSETS
from qat.training.errors import UserError, value_errors_reported
from qat.training.run.checkpoint import about_model, export_metadata
from qat.training.run.folder import read_summary
from qat.training.run.proof import MIN_AGREEMENT, prove

EXAMPLE = "python -m qat export runs/resnet_int8 --to model.onnx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `export`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument("--to", required=True, metavar="FILE", help="the file to write; an existing one is refused")
    parser.add_argument("--exact-sums", action="store_true", help="add residual sums in float32, as torch does")
    parser.add_argument("--unpacked", action="store_true", help="8 bits for weights of 4 and fewer, see export_onnx")
    parser.add_argument(
        "--opset", type=int, default=OPSET, metavar="N", help=f"{OPSETS[0]} to {OPSETS[-1]}; default: {OPSET}"
    )
    parser.add_argument("--input", metavar="NAME", help="name of the file's input")
    parser.add_argument("--output", metavar="NAME", help="name of the file's output")
    parser.add_argument(
        "--pixels", action="store_true", help="the file takes uint8 images (N, H, W, 3) and normalises them itself"
    )
    parser.add_argument("--no-proof", action="store_true", help="do not run the file over the validation split")


def run(given: argparse.Namespace) -> int:
    """Export, then prove; 1 if the proof fails."""
    opened, path = open_run(given.run_path, given.model), Path(given.to).expanduser()
    if path.exists():
        raise UserError(f"--to: '{path}' exists; choose another name, or remove it")
    check_folder_of("--to", path)
    model = opened.quantized
    assert isinstance(model, fx.GraphModule)
    data = None if given.no_proof else opened.data(given.overrides)
    size, kept = opened.config.data.image_size, opened.transform.preprocessing
    options = {
        "exact_sums": given.exact_sums,
        "packed": not given.unpacked,
        "opset": given.opset,
        "normalization": (kept.mean, kept.std) if given.pixels else None,
        "input_names": None if given.input is None else [given.input],
        "output_names": None if given.output is None else [given.output],
    }
    with value_errors_reported():
        qat.export_onnx(model, path, torch.zeros(1, 3, size, size), metadata=_metadata(opened), **options)
    print(f"{path}: {path.stat().st_size:,} bytes")
    if data is None:
        print("not proven (--no-proof)")
        return 0
    if given.pixels:
        return _prove_pixels(opened, path, data.val)
    proof = prove(path, model, data.val)
    print("\n".join([*proof.sentences(), *(f"warning: {each}" for each in proof.warnings())]))
    problem = proof.problem()
    if problem:
        print(f"{path}: {problem}")
    return int(bool(problem))


def _prove_pixels(opened: Run, path: Path, batches: Iterable[Any]) -> int:
    """Whether a file that takes pixels answers as the trained model; 1 if it does so in fewer than 99.5 %."""
    engine, equal, images = Run(path).engine("onnxruntime"), 0, 0
    for batch, _ in batches:
        ours, theirs = in_torch(opened.quantized, batch), engine(batch)
        equal, images = equal + int((ours.argmax(1) == theirs.argmax(1)).sum()), images + len(batch)
    print(f"ONNX Runtime, from pixels: {100 * equal / images:.2f} % of {images:,} predictions are equal")
    return int(equal < MIN_AGREEMENT * images)


def _metadata(opened: Run) -> dict[str, object]:
    """What train.py writes into its file, of the same weights."""
    summary = read_summary(opened.folder) or {}
    about = about_model(opened.config, opened.classes, opened.transform.preprocessing)
    return export_metadata(about, summary, opened.quantized) if "qat" in summary else about
