"""Write the integer model of a run to a file, and prove it."""

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, fx

import qat
from qat.cli.runs import Run, add_run, check_folder_of, in_torch, open_run
from qat.cli.runtimes import TFLITE
from qat.cli.verify import compared, is_other, sentences
from qat.export.agreement import Pair, output_tensors
from qat.export.exporter import Format
from qat.export.litert.firmware import arena_bytes, vela_estimate, write_c_array, write_multipliers
from qat.export.onnx.operators import OPSET, OPSETS
from qat.export.onnxruntime.verification import LayerComparison
from qat.export.ties import explained
from qat.layers import QuantLayer
from qat.training.data.loaders import Batch
from qat.training.data.transforms import ToInput
from qat.training.errors import UserError, value_errors_reported
from qat.training.run.checkpoint import about_model, export_metadata
from qat.training.run.folder import MODEL, read_summary
from qat.training.run.proof import prove

EXAMPLE = "python -m qat export runs/resnet_int8 --to model.onnx"
OPTIONS = {  # by target
    "onnx": ("format", "exact_sums", "unpacked", "opset", "dynamic", "input", "output", "pixels"),
    "litert": ("integer_ends", "four_bits", "c_array", "table", "vela"),
}
NEEDED = {  # by option of litert, the module that it needs, and its package
    "target": ("ai_edge_litert", "ste-qat[litert]"),
    "table": ("tflite_micro", "ste-qat[litert]"),
    "vela": ("ethosu", "ethos-u-vela"),
}
ACCELERATORS = [f"ethos-{each}" for each in ("u55-32", "u55-64", "u55-128", "u55-256", "u65-256", "u65-512", "u85-256")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    parser.add_argument(
        "--to", metavar="FILE", help="an existing one is refused; default: model.onnx or model.tflite in RUN"
    )
    parser.add_argument("--target", choices=tuple(OPTIONS), default="onnx", help="the kind of file; default: onnx")
    parser.add_argument("--no-proof", action="store_true", help="do not run the file over the validation split")
    onnx = parser.add_argument_group("with --target onnx")
    onnx.add_argument("--format", choices=get_args(Format), help="default: qdq; see export_onnx; no proof of qonnx")
    onnx.add_argument("--exact-sums", action="store_true", help="add residual sums in float32, as torch does")
    onnx.add_argument("--unpacked", action="store_true", help="8 bits for weights of 4 and fewer, see export_onnx")
    onnx.add_argument("--opset", type=int, metavar="N", help=f"{OPSETS[0]} to {OPSETS[-1]}; default: {OPSET}")
    onnx.add_argument("--dynamic", metavar="AXES", help="free axes: batch (the default), or batch,height,width")
    onnx.add_argument("--input", metavar="NAME", help="name of the file's input")
    onnx.add_argument("--output", metavar="NAME", help="name of the file's output")
    onnx.add_argument(
        "--pixels", action="store_true", help="the file takes uint8 images (N, H, W, 3) and normalises them itself"
    )
    litert = parser.add_argument_group("with --target litert, a .tflite file of batches of 1")
    litert.add_argument("--integer-ends", action="store_true", help="int8 inputs and outputs, without float32")
    litert.add_argument("--four-bits", action="store_true", help="pack weights of 4 bits and fewer, see export_litert")
    litert.add_argument("--c-array", action="store_true", help="also write the file as C beside it, .c and .h")
    litert.add_argument("--table", metavar="FILE", help="also write the kernels' int32 multipliers and shifts as CSV")
    litert.add_argument("--vela", choices=ACCELERATORS, help="also estimate cycles and SRAM, by Arm's ethos-u-vela")


def run(given: argparse.Namespace) -> int:
    opened, litert = open_run(given.run_path, given.model), given.target == "litert"
    path = Path(given.to).expanduser() if given.to else opened.folder / (TFLITE if litert else MODEL)
    # All refusals come before the model is loaded.
    for name in OPTIONS["onnx" if litert else "litert"]:
        if getattr(given, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')}: is no option of --target {given.target}; leave it out")
    for name, (module, package) in NEEDED.items():
        if litert and getattr(given, name) and find_spec(module) is None:
            raise UserError(f"--{name}: {module} is not installed; pip install {package}")
    for file in (path, *(path.with_suffix(end) for end in (".c", ".h") if given.c_array)):
        if file.exists():
            raise UserError(f"--to: '{file}' exists; choose another name, or remove it")
    check_folder_of("--to", path)
    if given.table:
        check_folder_of("--table", Path(given.table).expanduser())
    return (_export_litert if litert else _export_onnx)(given, opened, path)


def _export_onnx(given: argparse.Namespace, opened: Run, path: Path) -> int:
    model = opened.quantized
    assert isinstance(model, fx.GraphModule)
    # Data that are missing show before the export; no runtime here reads qonnx.
    data = None if given.no_proof or given.format == "qonnx" else opened.data(given.overrides)
    size, kept = opened.config.data.image_size, opened.transform.preprocessing
    options = {
        "format": given.format or "qdq",
        "exact_sums": given.exact_sums,
        "packed": not given.unpacked,
        "opset": OPSET if given.opset is None else given.opset,
        "dynamic": (given.dynamic or "batch").split(","),
        "normalization": (kept.mean, kept.std) if given.pixels else None,
        "input_names": None if given.input is None else [given.input],
        "output_names": None if given.output is None else [given.output],
    }
    with value_errors_reported():
        qat.export_onnx(model, path, torch.zeros(1, 3, size, size), metadata=_metadata(opened), **options)
    print(f"{path}: {path.stat().st_size:,} bytes")
    if data is None:
        print("not proven (--no-proof)" if given.no_proof else "not proven: ONNX Runtime has no operator Quant")
        return 0
    if given.pixels:
        return _prove_pixels(opened, path, data.val)
    proof = prove(path, model, data.val, opened.config.task)
    print("\n".join([*proof.sentences(), *(f"warning: {each}" for each in proof.warnings())]))
    if problem := proof.problem():
        print(f"{path}: {problem}")
    return int(bool(problem))


def _export_litert(given: argparse.Namespace, opened: Run, path: Path) -> int:
    model, size = opened.quantized, opened.config.data.image_size
    data = None if given.no_proof else opened.data(given.overrides)
    ends, bits = given.integer_ends, given.four_bits
    with value_errors_reported():
        example = torch.zeros(1, 3, size, size)
        qat.export_litert(model, path, example, integer_ends=ends, four_bits=bits, metadata=_metadata(opened))
    # Packing is an option: not every runtime reads 4 bits.
    few = any(isinstance(each, QuantLayer) and each.weight_quantizer.span() < 16 for each in model.modules())
    print(f"{path}: {path.stat().st_size:,} bytes" + " (weights of few bits take 8: --four-bits)" * (few and not bits))
    if given.c_array:
        name = write_c_array(path.read_bytes(), path)
        print(f"{path.with_suffix('.c')}, {path.with_suffix('.h')}: {name}[{path.stat().st_size}]")
    if given.table:
        write_multipliers(path.read_bytes(), Path(given.table).expanduser())
        print(f"arena: {arena_bytes(path.read_bytes()):,} bytes in TensorFlow Lite Micro, with pointers of 64 bits")
    if given.vela:
        with value_errors_reported("--vela: "):
            vela = vela_estimate(path, given.vela)
        memory = f"{vela['SRAM']:,.1f} KiB of SRAM, {vela['flash']:,.1f} KiB of flash"
        print(f"{given.vela}: {vela['cycles']:,.0f} cycles, {memory}, by vela's estimate")
    if data is None:
        print("not proven (--no-proof)")
        return 0
    found, layers, behind = compared(path, model, data.val, "litert", opened.task.has_classes)
    print("\n".join(sentences(found, layers, behind, "litert")))
    if not is_other(layers, behind, "litert"):
        return 0
    print(f"{path}: it is NOT the trained model; do not deploy it")
    return 1


# ONNX Runtime's answers to pixels, against torch's to what the file makes of them.
def _prove_pixels(opened: Run, path: Path, batches: Iterable[Batch]) -> int:
    engine, model, kept = Run(path).engine("onnxruntime"), opened.quantized, opened.transform.preprocessing
    task = opened.task

    def answer(batch: Batch) -> tuple[Tensor, Pair]:
        ours, theirs = output_tensors(in_torch(model, batch[0], task)), output_tensors(engine(batch[0]))
        return opened.as_pixels(batch[0]), (ours, theirs, None)

    comparison, normalize = LayerComparison(path, model), ToInput(kept.mean, kept.std)
    comparison.model.register_forward_pre_hook(lambda _, given: (normalize(given[0].permute(0, 3, 1, 2)),))
    found = explained(batches, answer, comparison.follow, classes=task.has_classes)
    equal = f"{100 * (1 - found.differing / found.predictions):.2f} % of {found.predictions:,} predictions are equal"
    print(f"ONNX Runtime, from pixels: {equal}" + ("" if found.explained else "; what differs is not rounding"))
    return int(not found.explained)


def _metadata(opened: Run) -> dict[str, object]:
    summary = read_summary(opened.folder) or {}
    about = about_model(opened.config, opened.classes, opened.transform.preprocessing)
    return export_metadata(about, summary, opened.quantized) if "qat" in summary else about
