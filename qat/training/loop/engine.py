"""Training loop of one stage; the device is read every `log_every` steps only."""

import math
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from qat.analysis.state import not_finite
from qat.batch_norm import copied_statistics, freeze_batch_norm, sync_batch_norm
from qat.collectives import largest, of_all_ranks, rank, rank_count, take_from_first
from qat.finetuning import EMA, grouped
from qat.finetuning.distillation import LOGITS
from qat.graph.guards import Snapshot
from qat.kernels import float_products
from qat.quantizer import Quantizer
from qat.switches import freeze_scales
from qat.training.config.stages import QATStageConfig
from qat.training.errors import UserError
from qat.training.loop.aids import Aids
from qat.training.loop.evaluation import Evaluation, evaluate, settle_statistics, to_device
from qat.training.loop.forward import EvaluationGraph, Forward, autocast, averaged, faster_way, switches
from qat.training.loop.metrics import Meter, Pace, Watch, log_epoch, log_window, looking, timed
from qat.training.loop.optimizer import build_optimizer, build_schedule, describe_groups
from qat.training.loop.stage import Batch, StageRun, rate_key, without_effect
from qat.training.run.checkpoint import StageState, capture_rng, restore_rng, save_checkpoint
from qat.training.run.exit_status import SignalledError, signals_deferred
from qat.training.run.folder import BEST_CHECKPOINT, FLOAT_WEIGHTS, LAST_CHECKPOINT, State
from qat.training.run.logging import progress_bar


def train_stage(run: StageRun, state: StageState | None = None) -> Evaluation:
    """Train the model for the epochs of the stage, and return the last evaluation.

    After each epoch the model is evaluated, and last.pt (and best.pt) saved. With a `state`, training resumes from its
    checkpoint, whose weights the model already holds. If a loss is not finite, the run ends, and last.pt is of before.
    A signal ends it after the step, with a last.pt of that step.
    """
    run.model.to(run.device)
    if run.config.sync_batch_norm and rank_count() > 1:
        sync_batch_norm(run.model)
    if run.config.channels_last:
        run.model.to(memory_format=torch.channels_last)
    run.log.begin(run.name, run.first_step if state is None else run.step(state.epoch, state.step) + 1)
    if state is None:
        for sentence in without_effect(run):
            run.log.say(f"{run.name}: {sentence}")
    if run.stage.epochs == 0:
        if note := settle_statistics(run, 0):
            run.log.say(f"{run.name}: {note}")
        evaluation = _validate(run)
        if not math.isfinite(evaluation.loss):
            raise UserError(
                f"{run.name}: the validation loss is {evaluation.loss} without any training; try other weights"
                " (model.weights, model.checkpoint)"
            )
        if run.keep_best:
            _save(run, BEST_CHECKPOINT, 0, evaluation)
        return evaluation
    if len(run.train) == 0:
        raise UserError(f"data.batch_size: {run.config.data.batch_size} leaves no whole training batch; reduce it")
    training = Training(run)
    run.log.say(f"{run.name}: {describe_groups(training.optimizer)}")
    if run.wants_graphs and not run.in_graphs:
        run.log.say(f"{run.name}: steps run without CUDA graphs, slower: {run.graphs_refused}")
    if training.aids.oscillations is not None and (left_out := training.aids.oscillations.left_out):
        name, why = next(iter(left_out.items()))
        run.log.say(f"{run.name}: qat.oscillation leaves out {len(left_out)} weights; that of {name!r} {why}")
    if state is not None:
        training.load(state)
    last: Evaluation | None = None
    with signals_deferred() as training.signals:
        for epoch in range(state.epoch if state else 0, run.stage.epochs):
            last = training.epoch(epoch)
    if training.ema is not None:
        training.ema.copy_to(run.model)
        settle_statistics(run, run.stage.epochs)
    take_from_first(run.model)  # in training, each rank has BatchNorm statistics of its own
    return last or _validate(run)


class Training:
    """Everything that updates the weights of a stage, and is saved with them."""

    def __init__(self, run: StageRun) -> None:
        self.run, self.task = run, run.config.task.bound(run.model)
        self.optimizer = build_optimizer(run.model, run.stage)
        self.schedule = build_schedule(self.optimizer, run.stage, run.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=run.config.amp == "fp16")
        self.ema = None if run.stage.ema_decay is None else EMA(run.model, run.stage.ema_decay)
        self.aids = Aids(run.model, run.stage, run.distillation)
        self.watch, self.pace = Watch(run), Pace()
        self.model = self.aids.student  # with many ranks in DistributedDataParallel, which averages gradients
        self.forward: Forward | None = None  # the same in CUDA graphs, compiled or as it is; set by the first step
        self.evaluation: Forward | None = None  # called by evaluations; None without CUDA graphs
        self.recorded_for: Snapshot | None = None  # the `switches` with which these three were made
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.best_score = -1.0
        self.done = 0  # steps of this epoch
        self.whole, self.window = Meter(), Meter()  # sums of this epoch, and since the last point of the curves
        self.saved, self.signals = time.monotonic(), list[int]()
        if rank():
            torch.manual_seed(run.config.seed + rank())  # other dropout for other images

    def load(self, state: StageState) -> None:
        self.optimizer.load_state_dict(state.optimizer)
        self.schedule.load_state_dict(state.schedule)
        # If the stage has more epochs now, the saved rates are those of a shorter schedule.
        factors = [factor(self.schedule.last_epoch) for factor in self.schedule.lr_lambdas]
        for group, base, factor in zip(self.optimizer.param_groups, self.schedule.base_lrs, factors, strict=True):
            group["lr"] = base * factor
        self.scaler.load_state_dict(state.scaler)
        if self.ema is not None and state.ema is not None:
            self.ema.load_state_dict(state.ema)
        self.aids.load_state_dict(state.aids)
        self.watch.load_state_dict(state.watch)
        self.best_score, self.done = state.best_score, state.step
        self.whole, self.window = (Meter(**sums) for sums in state.meters)
        if rank() < len(state.rng):  # the run may have had fewer ranks
            restore_rng(state.rng[rank()], self.run.device)

    def epoch(self, epoch: int) -> Evaluation:
        run = self.run
        self.steps(epoch)
        training, self.done = self.whole, 0
        with self.averaged():
            notes = [settle_statistics(run, epoch + 1)]
            take_from_first(run.model)
            with looking(run.config, run.model, run.log, run.name, run.step(epoch + 1)):
                evaluation = _validate(run, self.evaluation)
            _check_finite(run, "validation", [evaluation.loss], epoch)
            if evaluation.score > self.best_score:
                self.best_score = evaluation.score
                if run.keep_best:
                    _save(run, BEST_CHECKPOINT, epoch + 1, evaluation)
            statistics = None if self.ema is None else copied_statistics(run.model)
        notes.append(self.aids.after_epoch(run.log, run.name, run.step(epoch + 1)))
        log_epoch(run, epoch, training, evaluation, self.left(epoch), "; ".join(filter(None, notes)))
        self.save(epoch + 1, evaluation, statistics)
        self.end_if_asked()
        return evaluation

    def left(self, epoch: int) -> str:
        own = (self.run.stage.epochs - epoch) * self.run.steps_per_epoch - (self.done or self.run.steps_per_epoch)
        return self.pace.left(own + self.run.later_steps)

    def save(self, epoch: int, evaluation: Evaluation | None = None, statistics: list[Tensor] | None = None) -> None:
        """Write last.pt, after whole epochs or within one."""
        self.aids.before_evaluation()  # with quant-noise, checkpoints are of the whole model on its grids
        take_from_first(self.run.model)
        state = StageState(
            epoch, self.done, [self.whole.sums(), self.window.sums()], self.best_score, self.optimizer.state_dict(),
            self.schedule.state_dict(), self.scaler.state_dict(), None if self.ema is None else self.ema.state_dict(),
            of_all_ranks(capture_rng(self.run.device)), self.aids.state_dict(), self.watch.state_dict(),
        )  # fmt: skip
        _save(self.run, LAST_CHECKPOINT, epoch, evaluation, vars(state), statistics)
        self.saved = time.monotonic()

    def save_if_due(self, epoch: int) -> None:
        """Save within an epoch if `checkpoint_every` says so; after a signal, end too."""
        every, due = self.run.config.checkpoint_every, False
        if isinstance(every, int):
            due = self.run.step(epoch, self.done) % every == 0
        elif every is not None:
            due = time.monotonic() - self.saved >= 60 * int(every.removesuffix("min"))
        due = due and self.done < self.run.steps_per_epoch  # else an evaluation and its last.pt are next
        if largest(due or bool(self.signals))[0]:  # clocks and signals differ between ranks
            self.read(epoch)
            self.save(epoch)
            self.end_if_asked()

    def end_if_asked(self) -> None:
        """Raise the signal that was sent to a rank, on all of them."""
        if asked := largest(max(self.signals, default=0))[0]:
            raise SignalledError(asked)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the averaged weights, if any."""
        if self.ema is None:
            return nullcontext()
        if self.aids.oscillations is not None:
            self.ema.hold(self.run.model, self.aids.oscillations)
        return self.ema.swapped(self.run.model)

    def steps(self, epoch: int) -> None:
        """Train for an epoch, or for the steps that a resumed one has left."""
        run = self.run
        run.train.set_epoch(run.epochs_before + epoch, self.done * run.stage.accumulate)
        run.model.train()
        self.aids.student.train()
        if isinstance(run.stage, QATStageConfig):
            if run.stage.freeze_bn_epoch is not None:
                freeze_batch_norm(run.model, epoch >= run.stage.freeze_bn_epoch)
            if run.stage.freeze_scales_epoch is not None and any(isinstance(m, Quantizer) for m in run.model.modules()):
                freeze_scales(run.model, epoch >= run.stage.freeze_scales_epoch)
        # Graphs, compiled code and DistributedDataParallel do not follow a change.
        if self.recorded_for is None or not self.recorded_for.is_unchanged():
            self.model, self.forward, self.recorded_for = self.aids.student, None, switches(run.model)
            self.evaluation = EvaluationGraph(run.model) if run.in_graphs else None
        if not self.done:
            self.whole, self.window = Meter(), Meter()
            self.aids.before_epoch(lambda batch: self.loss_of(self.on_device(batch))[0], run.train)
        steps, count = run.steps_per_epoch, rank_count()
        with progress_bar(run.train, f"{run.name} {epoch + 1}/{run.stage.epochs}") as bar:
            groups = grouped(timed(bar, lambda: self.window), run.stage.accumulate)
            for number, batches in enumerate(groups, self.done + 1):
                group = [self.on_device(batch) for batch in batches]
                if run.mixing is not None:
                    group = [run.mixing(images, labels) for images, labels in group]
                lr = self.optimizer.param_groups[0]["lr"]
                self.aids.before_step((epoch * steps + number - 1) / max(run.stage.epochs * steps - 1, 1))
                due = number % run.config.log_every == 0 or number == steps
                row, self.window.added = self.step(group, watched=bool(self.watch.quantizers) and due)
                self.window.rows.append(row)
                self.window.sizes.append(count * sum(len(labels) for _, labels in group))
                self.done, self.pace.steps = number, self.pace.steps + 1
                if due:
                    curves = self.read(epoch, self.watch.curves())
                    log_window(run, run.step(epoch, number), self.window, lr, self.watch.worth_drawing(curves))
                    bar.set_postfix_str(
                        f"loss {self.window.results['loss']:.3f}, run: {self.left(epoch)}", refresh=False
                    )
                    self.whole.merge(self.window)
                    self.window = Meter()
                self.save_if_due(epoch)
        self.aids.before_evaluation()

    def read(self, epoch: int, curves: dict[str, Tensor] | None = None) -> dict[str, float]:
        """Wait for the results of the steps so far; return the values of the curves."""
        losses, values = self.window.read(curves)
        _check_finite(self.run, "training", losses, epoch, first_step=self.done - len(losses) + 1)
        return values

    def on_device(self, batch: Batch) -> Batch:
        return to_device(batch, self.run.device, channels_last=self.run.config.channels_last)

    def step(self, group: list[Batch], watched: bool = False) -> tuple[Tensor, list[str]]:
        """Run an optimizer step; return (loss, correct, norm, added ...) and their names."""
        if self.forward is None:
            first = group[0]
            self.model = averaged(self.aids.student, lambda forward: self.total_of(first, forward)[0])
            self.forward = faster_way(self.run, self.model, first[0], lambda forward: self.loss_of(first, forward)[0])
        images = sum(len(labels) for _, labels in group)
        rows = []
        for number, batch in enumerate(group, 1):
            # Gradients are summed over the ranks once, in the last backward of a step.
            with nullcontext() if number == len(group) or rank_count() == 1 else self.model.no_sync():  # type: ignore[operator]
                rows.append(self.backward(batch, len(batch[1]) / images))
        loss, correct, *added = torch.stack([torch.stack(row) for row, _ in rows]).sum(dim=0).unbind()
        norm = torch.zeros_like(loss)
        if self.run.stage.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.parameters, self.run.stage.clip_grad_norm)
        self.scaler.step(self.optimizer)  # divides fp16's gradients by its scale first
        if watched:
            self.watch.keep_gradients()
        self.scaler.update()
        self.aids.after_step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.run.model)
        return torch.stack((loss, correct, norm.to(loss.dtype), *added)), rows[0][1]

    def backward(self, batch: Batch, share: float) -> tuple[list[Tensor], list[str]]:
        """Add a batch's share to the gradients; return as `step`, without a norm."""
        total, loss, output, added = self.total_of(batch, self.forward)
        self.scaler.scale(total * share).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            correct = self.task.correct(output[LOGITS], batch[1])
        # The curve is of the task's loss, to compare rules by; but a penalty that is not finite must end the run.
        shown = torch.where(total.isfinite(), loss, total).detach()
        parts = [value.detach().to(loss.dtype) * share for value in added.values()]
        return [shown * share, correct.to(loss.dtype), *parts], list(added)

    def total_of(
        self, batch: Batch, forward: Forward | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss to minimise, the task's own, the output, and the added losses."""
        loss, output = self.loss_of(batch, forward)
        added = self.aids.added(output, batch[0])
        return sum(added.values(), start=loss), loss, output, added

    def loss_of(self, batch: Batch, forward: Forward | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the task's loss, and the logits with features for a distillation."""
        images, labels = batch
        products = float_products() if self.run.config.integer_forward == "off" else nullcontext()
        with autocast(self.run.device, self.run.config.amp), products:
            output = (self.run.model if forward is None else forward)(images)
        watched = output if isinstance(output, dict) and LOGITS in output else {LOGITS: output}
        loss, answers = self.task.training_loss(watched[LOGITS], images, labels, self.run.stage.label_smoothing)
        return loss, {**watched, LOGITS: answers}


def _validate(run: StageRun, forward: Forward | None = None) -> Evaluation:
    progress, layout = f"{run.name} validation", run.config.channels_last
    return evaluate(
        run.model, run.val, run.device, channels_last=layout, progress=progress, forward=forward, task=run.config.task
    )


def _check_finite(run: StageRun, split: str, losses: list[float], epoch: int, first_step: int | None = None) -> None:
    for offset, loss in enumerate(losses):
        if not math.isfinite(loss):
            where = f"epoch {epoch + 1}" + ("" if first_step is None else f", step {first_step + offset}")
            advice = [f"a lower {rate_key(run.config, run.name)} (now {run.stage.lr:g})"]
            if run.stage.clip_grad_norm is None:
                advice.append(f"{'float' if run.name == 'float' else 'qat'}.clip_grad_norm=1")
            if run.config.amp != "none":
                advice.append("amp=none")
            said = ", and ".join(filter(None, (f"the {split} loss is {loss} in {where}", not_finite(run.model))))
            raise UserError(f"{run.name}: {said}; try {' or '.join(advice)}{_way_on(run)}")


def _way_on(run: StageRun) -> str:  # a run cannot resume with another lr
    file = run.folder / (LAST_CHECKPOINT if run.name == "float" else FLOAT_WEIGHTS)
    return f", from model.checkpoint={file} in another run_dir" if file.is_file() else ""


def _save(
    run: StageRun,
    file: str,
    epochs: int,
    evaluation: Evaluation | None,
    state: State | None = None,
    statistics: list[Tensor] | None = None,
) -> None:
    if bad := not_finite(run.model):  # keep the last file that was finite
        rate = rate_key(run.config, run.name)
        raise UserError(f"{run.name}: {bad} after epoch {epochs}; try a lower {rate}{_way_on(run)}")
    payload = {
        "stage": run.name,
        "epochs": epochs,
        "model": run.model.state_dict(),
        "state": state,
        "results": run.results,
        "config": run.config.model_dump(mode="json"),
        "evaluation": {
            run.config.task.metric: getattr(evaluation, "score", None),
            "loss": getattr(evaluation, "loss", None),
        },
        "statistics": statistics,
        "about": run.about,
    }
    save_checkpoint(run.folder / file, payload)
