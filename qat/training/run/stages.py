"""Stages of a run, from the float model to the proof; or only their cost and time."""

import itertools
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from timeit import timeit

import torch
from torch import fx, nn

import qat
from qat.analysis.state import float_state_dict
from qat.calibration import Step
from qat.collectives import rank, rank_count
from qat.export import LayerDifference
from qat.text import table
from qat.training.config.schema import RunConfig
from qat.training.data.loaders import Data, Loader
from qat.training.errors import UserError, value_errors_reported
from qat.training.loop import stage as stages
from qat.training.loop.aids import build_distillation, build_mixing
from qat.training.loop.engine import Training, train_stage
from qat.training.loop.evaluation import Evaluation, evaluate, warnings_about
from qat.training.loop.metrics import looking
from qat.training.loop.stage import StageRun, rate_key
from qat.training.model import load_float_weights, prepare_model
from qat.training.ranks import from_first
from qat.training.report.analysis import analyse
from qat.training.run import checkpoint
from qat.training.run.checkpoint import StageState, load_checkpoint
from qat.training.run.folder import (
    ANALYSIS,
    BEST_CHECKPOINT,
    FLOAT_WEIGHTS,
    LAYERS,
    MODEL,
    Json,
    RunFolder,
    State,
    write_text,
)
from qat.training.run.logging import RunLog, add_layout
from qat.training.run.proof import export_and_prove
from qat.training.run.report import describe_choice
from qat.training.tasks.known import score_of

HOW_IT_TRAINS = (  # explains the table of `qat.explain` to a reader of layers.txt
    "How it trains: on codes is the fast way, on 8-bit integers in kernels of this library; operation by operation is"
    " in float32 on the same grids, by torch's own operations. Both are the same function, which is exported."
)


@dataclass
class Stages:
    """Stages of a run; a resumed run skips those that it had finished."""

    config: RunConfig
    data: Data
    device: torch.device
    prepared: dict[str, nn.Module]  # by stage: the model on its grids, as prepared at the start of the run
    log: RunLog
    folder: RunFolder
    before: Json  # summary of the finished run that is extended; else empty
    resumed: State | None  # payload of the checkpoint
    results: Json
    about: Json
    steps: int = 0
    qat_epochs: int = 0
    compared: list[LayerDifference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = list(stages.stages_of(self.config))
        self.first_on_grids = next(iter(stages.progressive_stages(self.config.qat)), "qat")
        self.float_weights = self.folder.path / FLOAT_WEIGHTS  # QAT starts from these

    def float_baseline(self, model: nn.Module) -> None:
        """Train the float model, or use it as loaded; QAT starts from its weights."""
        if self.config.float.epochs == 0 and not (self.config.model.weights or self.config.model.checkpoint):
            why = "no training (float.epochs: 0), no weights, no checkpoint"
            self.log.say(f"float: {why}: QAT starts from random weights")
        self._train("float", model)
        if not self._is_finished("float"):
            checkpoint.save_float_weights(self.float_weights, model)
        if rank() == 0:
            self.results["float"]["size_bytes"] = self.float_weights.stat().st_size

    def float_finetune(self, model: nn.Module) -> None:
        """Fine-tune the float model as QAT does, for a fair comparison."""
        if not self._is_finished("float_finetune"):
            load_float_weights(model, self.float_weights, self.config.model.name)
        self._train("float_finetune", model)

    def quantized(self, model: nn.Module) -> nn.Module:
        """Return the prepared model with float weights; write its table of layers."""
        prepared = self._on_grids("qat", self.config, model)
        layers = qat.summary(prepared)
        if not self._has_begun("qat"):  # else the file already shows learned ranges
            write_text(self.folder.path / LAYERS, layers + "\n")
        lines = layers.splitlines()
        end = lines.index("")
        left = [line for line in lines[:end] if "stays float:" in line]
        self.log.say("\n".join([f"prepared: {lines[end + 1]}", *lines[end + 2 :], *left]))
        return prepared

    def calibrate(self, model: nn.Module) -> None:
        """Set the activation ranges from training images, and evaluate the model."""
        if self._has_begun(self.first_on_grids):
            return
        with value_errors_reported():
            own = self.config.float.epochs == 0  # ranges that the user's own layers have learned stay
            qat.calibrate(model, self._sample(alone=True), only_missing=own, steps=self._steps())
        self._write_layers(model)
        self.log.begin(self.first_on_grids, self.steps)
        with looking(self.config, model, self.log, self.first_on_grids, self.steps) as statistics:
            found = evaluate(
                model, self.data.val, self.device, channels_last=self.config.channels_last, task=self.config.task
            )
        task = self.config.task
        self.results["calibrated"] = {task.metric: found.score, **self._by_class(found)}
        self.log.say(f"calibrated: val {task.title} {found.score:.2f} %")
        self.log.scalars(self.first_on_grids, "val", {"loss": found.loss, task.metric: found.score}, self.steps)
        if statistics:
            add_layout(self.log, model, statistics)

    def progressive(self, float_model: nn.Module, model: nn.Module) -> None:
        """Train on the grids of `qat.progressive` in turn, each from the last weights."""
        trained: nn.Module | None = None
        for name, stage in stages.progressive_stages(self.config.qat).items():
            on_grids = model
            if not self._is_finished(name):
                on_grids = self._on_grids(name, stages.on_grids_of(self.config, stage), float_model)
                if not self._has_begun(name):
                    self._start_from(trained, on_grids)
                trained = on_grids
            self._train(name, on_grids)
        if trained is not None:
            self._start_from(trained, model)

    def _on_grids(self, name: str, config: RunConfig, float_model: nn.Module) -> nn.Module:
        prepared = self.prepared.pop(name)
        # A resumed run prepared its model with other weights than the run's, and so with other ranges.
        if self.resumed or prepared.load_state_dict(float_model.state_dict(), strict=False).unexpected_keys:
            prepared = prepare_model(float_model, config, self.data.image_shape)
        qat.enable_fake_quant(prepared)  # layers of one's own computed in float till now
        layout = torch.channels_last if self.config.channels_last else torch.preserve_format
        return prepared.to(self.device).to(memory_format=layout)

    def _start_from(self, trained: nn.Module | None, model: nn.Module) -> None:
        if trained is not None:
            model.load_state_dict(float_state_dict(trained), strict=False)  # without its ranges
        with value_errors_reported():
            qat.calibrate(model, self._sample(alone=True), steps=self._steps() if trained is None else [])

    def qat(self, model: nn.Module) -> None:
        """Fine-tune with quantization, choose the epoch, and write the table of layers."""
        self._train("qat", model)
        self._write_layers(model)

    def export(self, model: nn.Module) -> str:
        """Write and prove model.onnx; return why the proof failed, or ""."""
        if not self.config.export.onnx:
            if (self.folder.path / MODEL).exists():
                self.warn([f"{MODEL} is of an earlier export: export.onnx is false"])
            return ""
        exported = self.before["qat"] if "onnx" in self.before else {}
        self.log.say(f"export: {describe_choice(self.results['qat'], exported)}")
        assert isinstance(model, fx.GraphModule)  # `rehearse` checks it
        metadata = checkpoint.export_metadata(self.about, self.results, model)
        path, example = self.folder.path / MODEL, torch.zeros(1, *self.data.image_shape)
        proof = export_and_prove(model, path, example, self.data.val, self.config, metadata, self.log)
        self.results["onnx"], self.compared = proof.results, proof.layers
        self.log.say("\n".join(proof.sentences()))
        if self.config.export.end_to_end:
            from qat.training.run.end_to_end import END_TO_END, export_end_to_end

            found = export_end_to_end(path, model, example, self.data.val, self.config.task)
            self.results["onnx"]["end_to_end"] = found
            self.log.say(f"{END_TO_END}: val {self.config.task.title} {score_of(found):.2f} % of the boxes it gives")
        self._write_layers(model, proof.saturation_table())
        self.results["warnings"].extend(proof.warnings())
        return proof.problem()

    def analyse(self, float_model: nn.Module, model: nn.Module) -> None:
        if self.config.watch == "all":
            task, path = self.config.task.bound(model), self.folder.path
            found = analyse(model, float_model.to(self.device), self.data, self.device, task, path, bool(self.compared))
            write_text(path / ANALYSIS, json.dumps(found) + "\n")

    def warn(self, sentences: list[str]) -> None:
        self.results.setdefault("warnings", []).extend(sentences)
        for sentence in sentences:
            self.log.say(f"warning: {sentence}")

    def _write_layers(self, model: nn.Module, *more: str) -> None:
        parts = [qat.summary(model), HOW_IT_TRAINS, qat.explain(model), *more]
        write_text(self.folder.path / LAYERS, "\n\n".join(parts) + "\n")

    def _train(self, name: str, model: nn.Module) -> None:
        stage = stages.stages_of(self.config)[name]
        first_step, own_steps = self.steps, stage.epochs * stages.steps_per_epoch(stage, self.data.train)
        if name != "float_finetune":  # its curves lie over those of QAT, which starts from the same weights
            self.steps += own_steps
        epochs_before = self.qat_epochs
        if name.startswith("qat"):
            self.qat_epochs += stage.epochs
        if self._is_finished(name):
            return
        state = None
        if self.resumed and self.resumed["stage"] == name:
            assert self.folder.checkpoint is not None
            checkpoint.restore_model(self.folder.checkpoint, self.resumed, model)
            state = StageState(**self.resumed["state"])
            done = f"all {stage.epochs} epochs are trained; evaluating the last one"
            within = f", step {state.step} of the next" if state.step else ""
            on = f"going on after epoch {state.epoch} of {stage.epochs}{within}"
            self.log.say(f"{name}: {done if state.epoch == stage.epochs else on}")
        classes = len(self.data.classes)
        distillation = None
        if stage.epochs > (state.epoch if state else 0):  # else it needs no teacher, whose file may be gone
            distillation = build_distillation(self.config, stage, classes, self.float_weights, self.device)
        run = StageRun(
            name, stage, self.config, model, self.data.train, self.data.val, self.device, self.log, self.folder.path,
            self.results, first_step, epochs_before, stages.steps_after(self.config, name, self.data.train),
            keep_best=name == "qat", sample=self._sample(), distillation=distillation,
            mixing=build_mixing(stage, classes), about=self.about,
        )  # fmt: skip
        evaluation = train_stage(run, state)
        choice: Json = {}
        if name == "qat":
            epoch, evaluation = choose_weights(run, evaluation)
            choice = {"weights": self.config.export.weights, "epoch": epoch}
        start = score_of(self.results.get({"qat": "calibrated", "float_finetune": "float"}.get(name, ""), {}))
        task = self.config.task
        choice |= {"epochs": stage.epochs, **self._by_class(evaluation)}
        self.results[name] = {task.metric: evaluation.score, "loss": evaluation.loss, **choice}
        self.results["val_images"] = evaluation.count
        self.warn(warnings_about(name, rate_key(self.config, name), stage, evaluation, start, task))

    def _by_class(self, evaluation: Evaluation) -> Json:
        by_class = [None if math.isnan(each) else each for each in evaluation.by_class]
        return {"by_class": dict(zip(self.data.classes, by_class, strict=False))} if by_class else {}

    def _steps(self) -> list[Step]:
        return [step.build() for step in self.config.quantization.calibration_steps]

    def _sample(self, alone: bool = False) -> Loader:
        return self.data.calibration(self.config.quantization.calibration_batches, alone)

    def _is_finished(self, name: str) -> bool:
        return self.resumed is not None and self.order.index(name) < self.order.index(self.resumed["stage"])

    def _has_begun(self, name: str) -> bool:
        return self._is_finished(name) or (self.resumed is not None and self.resumed["stage"] == name)


def choose_weights(run: StageRun, last: Evaluation) -> tuple[int, Evaluation]:
    """Load the epoch that `export.weights` names; return it with its evaluation."""
    path, epochs = run.folder / BEST_CHECKPOINT, run.stage.epochs
    if run.config.export.weights == "last" or epochs == 0:
        return epochs, last
    if rank() == 0 and not path.is_file():
        raise UserError(f"export.weights: 'best' needs {path}, which is missing; set export.weights=last")
    payload = from_first(load_checkpoint(path, "set export.weights=last") if rank() == 0 else {})
    if payload["epochs"] == epochs:
        return epochs, last
    checkpoint.load_evaluated(path, payload, run.model)
    return payload["epochs"], evaluate(
        run.model, run.val, run.device, channels_last=run.config.channels_last, task=run.config.task
    )


TIMED = 3  # timed steps of a stage, after one that warms up


def dry_run(config: RunConfig, data: Data, device: torch.device, model: nn.Module, prepared: nn.Module) -> None:
    """Print the layers, their cost, and the time of a run, from a few real steps."""
    if rank_count() > 1:
        raise UserError("--dry-run: is for one process; start it without torchrun")
    if len(data.train) == 0:
        raise UserError(f"data.batch_size: {config.data.batch_size} leaves no whole training batch; reduce it")
    print(qat.summary(prepared), end="\n\n")
    rows = qat.cost(prepared, torch.zeros(1, *data.image_shape))
    head = ["layer", "MACs", "weight bits", "input bits", "weight bytes", "BOPs"]
    cells = [[row.name, *(f"{value:,}" for value in (*row[1:], row.bops))] for row in rows]
    print(*table([head, *cells], numbers=True), sep="\n")
    macs, bops, size = (sum(getattr(row, key) for row in rows) for key in ("macs", "bops", "weight_bytes"))
    print(f"\none image: {macs / 1e9:.3f} G MACs; {bops / 1e9:,.1f} G bit operations (MACs * bits * bits)")
    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    print(f"weights: {size / 1e6:.2f} MB at their bits; the float model has {whole / 1e6:.2f} MB", flush=True)
    with value_errors_reported():
        qat.calibrate(prepared.to(device), data.calibration(1))
    epochs = stages.float_counterpart(config.qat).epochs  # of all stages on grids
    float_epochs = config.float.epochs + epochs * config.float_finetune
    seconds, layout = 0.0, torch.channels_last if config.channels_last else torch.preserve_format
    with tempfile.TemporaryDirectory(prefix="qat_dry_run_") as name:
        folder = Path(name)
        checkpoint.save_float_weights(folder / FLOAT_WEIGHTS, model)  # the run's own model may be the teacher
        kinds = (("float", model, config.float, float_epochs), ("qat", prepared, config.qat, epochs))
        for stage, each, settings, count in kinds:
            if count:
                teacher = build_distillation(config, settings, len(data.classes), folder / FLOAT_WEIGHTS, device)
                run = StageRun(
                    stage, settings, config, each.to(device).to(memory_format=layout), data.train, data.val, device,
                    RunLog(folder), folder, distillation=teacher,
                )  # fmt: skip
                one = _seconds_of_epoch(run)
                seconds += count * one
                print(f"{stage}: {count} epochs of about {one:.3g} s, by {TIMED} steps on {device}", flush=True)
    print(f"about {seconds / 60:.1f} min in all; calibration, export and proof besides")


def _seconds_of_epoch(run: StageRun) -> float:
    training, val = Training(run), [next(iter(run.val))]
    training.aids.student.train()
    batches = itertools.chain.from_iterable(itertools.repeat(run.train))  # over as many epochs as it takes

    def step() -> None:
        training.aids.before_step(0.0)
        group = [training.on_device(next(batches)) for _ in range(run.stage.accumulate)]
        training.step(group)[0].tolist()  # waits for the device

    def validate() -> None:
        evaluate(run.model, val, run.device, channels_last=run.config.channels_last, task=run.config.task)

    step()  # compiles and allocates
    steps = timeit(step, number=TIMED) / TIMED * run.steps_per_epoch
    training.aids.before_evaluation()
    validate()
    return steps + timeit(validate, number=1) * len(run.val)
