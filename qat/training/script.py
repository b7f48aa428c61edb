"""The training script: what `train.py` and `python -m qat train` run.

`run` and `run_stages` are the recipe, from top to bottom: float baseline, prepare, calibrate, QAT, export, proof.
"""

import argparse
import logging
import re
import shlex
import sys
import time
from pathlib import Path

import torch
from torch import nn

from qat.collectives import rank, rank_count
from qat.training import ranks
from qat.training.config.file import dump_config, load_config
from qat.training.config.imports import import_extensions
from qat.training.config.schema import RunConfig
from qat.training.data.loaders import Data, load_data
from qat.training.errors import UserError, problems_of
from qat.training.loop.aids import Aids, check_distillation
from qat.training.loop.forward import autocast, check_graphs
from qat.training.loop.stage import key_of, on_grids_of, progressive_stages
from qat.training.model import build_model, build_recipe, check_forward, load_float_weights, prepare_model, rehearse
from qat.training.report.page import finish
from qat.training.run import folder as files
from qat.training.run.checkpoint import about_model, check_same_data, load_checkpoint
from qat.training.run.exit_status import exit_status
from qat.training.run.folder import Json, RunFolder, State, read_summary
from qat.training.run.logging import CURVES, RunLog
from qat.training.run.report import report_lines, write_summary
from qat.training.run.stages import Stages, dry_run

WHAT = "Fine-tune a torchvision model with quantization, export it to integers, and prove that both predict the same."
OVERRIDE = re.compile(r"[a-z_][\w.\[\]]*=")  # the start of `key.path=value`
CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # shipped: a link in the repository, files in a wheel


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and run; return 1 if the proof failed, see `exit_status`."""
    parser = argparse.ArgumentParser(description=WHAT, epilog="example: python train.py resnet_int8.yaml qat.epochs=2")
    add_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    return exit_status(lambda: run_parsed(parsed))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    dry = "show layers, cost and time, and train and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.add_argument("named", nargs="?", metavar="CONFIG", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--config", help="the same")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change one value of the config")


def run_parsed(parsed: argparse.Namespace) -> int:
    logging.getLogger("qat").setLevel(logging.INFO)
    words = [word for word in (parsed.named, *parsed.overrides) if word is not None]
    config = parsed.config or next((word for word in words if not OVERRIDE.match(word)), None)
    if config is None:
        raise UserError("CONFIG: missing; name a YAML file, such as resnet_int8.yaml")
    if parsed.config is None:
        words.remove(config)
    return run(load_config(config, words, CONFIGS), parsed.dry_run)


def run(config: RunConfig, dry: bool = False) -> int:
    device = ranks.pick_device(config.device)
    with ranks.process_group(device):
        if rank():
            logging.getLogger("qat").setLevel(logging.ERROR)  # rank 0 says the rest for all
        if folder := ranks.remembered_folder():  # torchrun has restarted the ranks: they go on where they were
            config = config.model_copy(update={"run_dir": folder, "resume": "auto"})
        return _run(config, device, dry)


def _run(config: RunConfig, device: torch.device, dry: bool) -> int:
    started = time.perf_counter()
    autocast(device, config.amp)  # refuses a precision that the device does not have
    check_graphs(device, config.cuda_graphs)
    ranks.seed_everything(config.seed)
    import_extensions(config.imports)
    build_recipe(config.quantization)  # refuses a wrong recipe before data are read or downloaded
    # A run that goes on needs no pretrained weights: they are in its folder. Only rank 0 sees that.
    anew = ranks.from_first(not files.continues(config, dry))
    with ranks.first_rank_first():
        data = load_data(config.data, config.seed, device, config.channels_last, config.task.kind)
        model = build_model(config.model, len(data.classes), with_weights=anew)
    prepared = check_early(config, data, model, anew)
    if dry:
        dry_run(config, data, device, model, prepared["qat"])
        return 0
    opened = ranks.from_first(files.open_run_folder(config) if rank() == 0 else None)
    with opened as folder:  # no other run can write there
        ranks.remember_folder(str(folder.path))
        if folder.finished is None:
            return run_stages(config, data, device, model, prepared, folder, started)
    if rank():
        return 0
    ways = "a larger qat.epochs trains on, resume=never in another run_dir starts a new one"
    print(f"{folder.path}: this run is finished; {ways}")
    return _verdict(folder.path, (read_summary(folder.path) or {})["problem"] or "")


def check_early(config: RunConfig, data: Data, model: nn.Module, anew: bool) -> dict[str, nn.Module]:
    """Prepare the model for each stage; show what is wrong before hours of training."""
    shape = data.image_shape
    check_forward(model, config, shape, len(data.classes), data.kind)
    prepared = {"qat": prepare_model(model, config, shape)}
    rehearse(prepared["qat"], config.export.onnx)
    check_distillation(config, model, prepared["qat"], data, anew)
    Aids(prepared["qat"], config.qat)  # refuses aids that find nothing to act on
    for name, stage in progressive_stages(config.qat).items():
        with problems_of(key_of(name)):
            prepared[name] = prepare_model(model, on_grids_of(config, stage), shape)
            rehearse(prepared[name], exports=False)
    return prepared


def run_stages(
    config: RunConfig,
    data: Data,
    device: torch.device,
    model: nn.Module,
    prepared: dict[str, nn.Module],
    folder: RunFolder,
    started: float,
) -> int:
    """Run the stages that the folder does not contain yet, up to the proof."""
    resumed = ranks.from_first(_read_checkpoint(folder, config) if rank() == 0 else None)
    results: Json = resumed["results"] if resumed else {}
    changes = check_same_data(resumed, data.classes, data.contents) if resumed else []
    results["data"] = data.contents
    about = about_model(config, data.classes, data.preprocessing)
    before = read_summary(folder.path) or {}
    if rank() == 0:
        # Without summary.json, the folder counts as unfinished.
        for name in (files.SUMMARY, files.ANALYSIS, files.LATENCY):
            (folder.path / name).unlink(missing_ok=True)

    with RunLog(folder.path) as log:
        curves = f"tensorboard --logdir {shlex.quote(str(folder.path / CURVES))}"
        # Written first: a start that ends from here on can be repeated.
        files.write_text(folder.path / files.RESOLVED_CONFIG, dump_config(config))
        log.say(f"run folder: {folder.path}; device: {device}; curves: {curves}")
        if rank_count() > 1:
            size, share = config.data.batch_size, config.data.batch_size // rank_count()
            log.say(f"{rank_count()} ranks: a batch (data.batch_size) has {size} images, {share} on each rank")
        stages = Stages(config, data, device, prepared, log, folder, before, resumed, results, about)

        stages.warn(changes)
        stages.float_baseline(model)
        if config.float_finetune:
            stages.float_finetune(build_model(config.model, len(data.classes), with_weights=False))
        load_float_weights(model, stages.float_weights, config.model.name)
        quantized = stages.quantized(model)
        stages.calibrate(quantized)
        stages.progressive(model, quantized)
        stages.qat(quantized)
        is_first = rank() == 0
        ranks.leave()
        if not is_first:
            return 0
        problem = stages.export(quantized)
        stages.analyse(model, quantized)

        seconds = time.perf_counter() - started
        summary = write_summary(folder.path / files.SUMMARY, config, about, results, seconds, problem)
        warnings = [f"warning: {sentence}" for sentence in results["warnings"]]
        log.say("\n".join(["", *report_lines(summary), "", *warnings]))
        finish(log, config, summary, stages.steps)
    names = sorted(path.name for path in folder.path.iterdir() if path.name[0] != ".")
    log.say(f"in {folder.path}: {', '.join(names)}")
    return _verdict(folder.path, problem)


def _verdict(folder: Path, problem: str) -> int:
    if problem:
        print(f"{folder / files.MODEL}: {problem}", file=sys.stderr)
    return int(bool(problem))


def _read_checkpoint(folder: RunFolder, config: RunConfig) -> State | None:
    if folder.checkpoint is None:
        return None
    payload = load_checkpoint(folder.checkpoint)
    if payload["state"] is None:
        raise UserError(f"{folder.checkpoint}: holds weights only (a best.pt?); a run goes on from its own last.pt")
    if payload["stage"] != "float" and not (folder.path / files.FLOAT_WEIGHTS).is_file():
        raise UserError(f"{folder.path}: {files.FLOAT_WEIGHTS} is missing, the float weights that the run goes on with")
    ahead = ("quantization", "qat", "imports") if payload["stage"] == "float" else ()
    files.check_same_config(folder.checkpoint, payload["config"], config, ahead)
    return payload
