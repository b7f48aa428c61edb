"""The training loop on a tiny quantized CNN: resuming, curves, averaging, freezing, and errors."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop.evaluation import evaluate
from qat.training.run.checkpoint import load_checkpoint
from qat.training.run.logging import RunLog
from tests.runs.tiny_training import (
    CPU,
    Outputs,
    Returns,
    TinyBatches,
    curves,
    resume,
    stage_run,
    tiny_model,
    train,
    user_error,
)


def test_a_step_is_smoothed_cross_entropy_with_auxiliary_losses_and_clipping(tmp_path: Path) -> None:
    """One step of plain SGD against autograd on the written-out loss."""
    torch.manual_seed(0)
    model = Returns(lambda y: Outputs(2 * y, y) if model.training else y)
    weight = model.fc.weight.detach().clone().requires_grad_()
    bias = model.fc.bias.detach().clone().requires_grad_()
    batches = TinyBatches(24)
    images, labels = batches.images.flatten(1), batches.labels
    logits = images @ weight.T + bias
    targets = torch.full((24, 2), 0.1).scatter(1, labels[:, None], 0.9)  # smoothing 0.2 over two classes
    losses = [-(targets * torch.log_softmax(y, 1)).sum(1).mean() for y in (logits, 2 * logits)]
    loss = losses[0] + 0.3 * losses[1]
    gradients = torch.autograd.grad(loss, (weight, bias))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    stage = StageConfig(lr=0.5, momentum=0, weight_decay=0, label_smoothing=0.2, clip_grad_norm=norm / 2)
    train(stage_run(tmp_path, model, stage, train=batches))
    torch.testing.assert_close(model.fc.weight.detach(), (weight - 0.25 * gradients[0]).detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.fc.bias.detach(), (bias - 0.25 * gradients[1]).detach(), rtol=1e-4, atol=1e-6)
    drawn = curves(tmp_path)
    assert drawn["qat/train/grad_norm"] == [(1, pytest.approx(norm, rel=1e-4))]
    assert drawn["qat/train/loss"] == [(1, pytest.approx(loss.item(), rel=1e-5))]
    accuracy = 100 * (logits.argmax(1) == labels).float().mean().item()
    assert drawn["qat/train/top1"] == [(1, pytest.approx(accuracy))]


def test_training_learns_and_logs_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model().eval()  # the engine has to set training mode
    run = stage_run(tmp_path, model, QATStageConfig(epochs=3, lr=0.1, warmup_epochs=1), first_step=100)
    before = evaluate(model, run.val, CPU)
    result = train(run)
    assert result.loss < before.loss / 2
    assert result.score == 100.0
    assert model.bn.num_batches_tracked.item() == 15

    drawn = curves(tmp_path)
    windows = [102, 104, 105, 107, 109, 110, 112, 114, 115]  # 5 steps an epoch, every second one and the last
    for tag in ("qat/train/loss", "qat/train/top1", "qat/train/lr", "qat/train/images_per_second"):
        assert [step for step, _ in drawn[tag]] == windows
    for tag in ("qat/val/loss", "qat/val/top1"):
        assert [step for step, _ in drawn[tag]] == [105, 110, 115]
    assert [step for step, _ in drawn["qat/train/quantizer_scale/quantizer"]] == windows
    assert "qat/train/grad_norm" not in drawn
    warmup = [0.1 * (0.01 + 0.99 * s / 5) for s in (1, 3, 4)]  # the rate that step s + 1 used
    decay = [0.05 * (1 + math.cos(math.pi * s / 10)) for s in (1, 3, 4, 6, 8, 9)]
    assert [value for _, value in drawn["qat/train/lr"]] == pytest.approx([*warmup, *decay])
    assert drawn["qat/val/loss"][-1][1] == pytest.approx(result.loss)
    start = 32 * model.quantizer.smallest_scale.item()
    assert drawn["qat/train/quantizer_scale/quantizer"][-1][1] == pytest.approx(model.quantizer.scale.item() / start)

    captured = capsys.readouterr()
    assert captured.err == ""  # no terminal: no bar
    lines = captured.out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["qat", "qat 1/3", "qat 2/3", "qat 3/3"]
    assert lines[0].startswith("qat: SGD: weights at lr 0.1 with decay 0.0001, norms at lr 0.1, ")
    assert f": val top1 100.00 %, loss {result.loss:.3f}; train " in lines[-1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_compiled_run_learns_like_a_plain_one(accumulate: int, tmp_path: Path) -> None:
    torch.compiler.reset()
    losses = {}
    for name, wanted in (("plain", False), ("compiled", True)):
        model: Any = tiny_model()
        model.dropout.p = 0.0  # compiled code draws other numbers
        run = stage_run(
            tmp_path / name, model, QATStageConfig(epochs=2, lr=0.1, accumulate=accumulate), config={"compile": wanted}
        )
        train(run)
        losses[name] = [value for _, value in curves(tmp_path / name)["qat/train/loss"]]
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-3) and len(set(losses["plain"])) > 1


@pytest.mark.parametrize(("config", "wanted", "refused"), [
    ({}, True, None),
    ({"cuda_graphs": True}, True, None),
    ({"cuda_graphs": False}, False, None),
    ({"compile": True}, False, None),
    ({"qat": {"quant_noise": {"share": 0.5}}}, True, "quant_noise draws in hooks"),
    ({"qat": {"distillation": {"features": {"fc": 1}}}}, True, "distillation.features reads tensors"),
    ({"qat": {"accumulate": 2}}, True, "accumulate adds to gradients"),
])  # fmt: skip
def test_steps_are_graphs_on_cuda(config: dict[str, Any], wanted: bool, refused: str | None, tmp_path: Path) -> None:
    run = stage_run(tmp_path, tiny_model(), QATStageConfig(**config.get("qat", {})), config=config)
    assert not run.wants_graphs
    run.device = torch.device("cuda")
    assert run.wants_graphs == wanted and str(run.graphs_refused).startswith(str(refused))


def test_the_averages_are_evaluated_saved_as_best_and_left_in_the_model(tmp_path: Path) -> None:
    """With decay 1 the average stays where it started, while the weights move."""
    model = tiny_model()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    untrained = evaluate(model, TinyBatches(7), CPU)
    still = QATStageConfig(epochs=2, lr=0.1).model_copy(update={"ema_decay": 1.0})  # a config refuses it
    result = train(stage_run(tmp_path, model, still))
    assert result.loss == untrained.loss
    start["bn.num_batches_tracked"] = torch.tensor(10)  # integers are not averaged
    torch.testing.assert_close(dict(model.state_dict()), start, rtol=0, atol=0)
    best, last = load_checkpoint(tmp_path / "best.pt"), load_checkpoint(tmp_path / "last.pt")
    assert torch.equal(best["model"]["fc.weight"], start["fc.weight"])
    assert best["epochs"] == 1  # the second epoch was only as good
    assert not torch.equal(last["model"]["fc.weight"], start["fc.weight"])


def test_frozen_statistics_and_scales_stay_while_gammas_and_weights_learn(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[tuple[float, list[float], list[float], Tensor]] = []

    class Spy(TinyBatches):
        def set_epoch(self, epoch: int, first: int = 0) -> None:
            super().set_epoch(epoch, first)
            weight = model.fc.weight.detach().clone()
            seen.append(
                (model.quantizer.scale.item(), model.bn.running_mean.tolist(), model.bn.weight.tolist(), weight)
            )

    spy, stage = Spy(), QATStageConfig(epochs=3, lr=0.1, freeze_bn_epoch=1, freeze_scales_epoch=1)
    train(stage_run(tmp_path, model, stage, train=spy, keep_best=False))
    spy.set_epoch(3)
    scales, means, gammas, weights = zip(*seen, strict=True)
    for kept in (scales, means):
        assert kept[0] != kept[1] == kept[2] == kept[3]
    assert len({tuple(gamma) for gamma in gammas}) == 4 and not torch.equal(weights[1], weights[2])
    assert load_checkpoint(tmp_path / "last.pt")["model"]["quantizer.frozen"] and not (tmp_path / "best.pt").exists()


def test_nan_outputs_are_refused_without_training_too(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.fc.bias.fill_(math.nan)
    assert user_error(train, stage_run(tmp_path, model, StageConfig(epochs=0))) == (
        "qat: the validation loss is nan without any training; try other weights (model.weights, model.checkpoint)"
    )


class Poisoned(TinyBatches):
    """Batches with a NaN in epoch 2, batch 3."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, (images, labels) in enumerate(super().__iter__(), 1):
            bad = (self.epoch, number) == (1, 3)
            yield (images * math.nan if bad else images), labels


@pytest.mark.parametrize(("stage", "config", "advice"), [
    (QATStageConfig(epochs=3), {}, "a lower qat.lr (now 0.01) or qat.clip_grad_norm=1"),
    (StageConfig(epochs=3, clip_grad_norm=1), {"amp": "bf16"}, "a lower qat.lr (now 0.1) or amp=none"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_stops_the_run(
    stage: StageConfig, config: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    run = stage_run(tmp_path, tiny_model(), stage, config=config, train=Poisoned())
    said = user_error(train, run)
    assert said.startswith(
        "qat: the training loss is nan in epoch 2, step 3, and conv.weight, conv.bias, bn.weight and "
    )
    assert said.endswith(f" more of the model are not finite; try {advice}")
    checkpoint = load_checkpoint(tmp_path / "last.pt")
    assert checkpoint["epochs"] == 1
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


def test_weights_broken_by_the_last_step_are_not_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model.fc.weight.register_hook(lambda gradient: gradient * math.inf)
    said = user_error(train, stage_run(tmp_path, model, QATStageConfig(clip_grad_norm=None), train=TinyBatches(24)))
    assert said == (
        "qat: the validation loss is nan in epoch 1, and fc.weight of the model is not finite; try a lower qat.lr (now"
        " 0.01) or qat.clip_grad_norm=1"
    )
    assert not (tmp_path / "last.pt").exists()


def test_a_finite_checkpoint_stays_where_a_scale_becomes_nan(tmp_path: Path) -> None:
    """A quantizer repairs its scale, so that no loss shows it."""
    model = tiny_model()
    (tmp_path / "float.safetensors").touch()
    calls = itertools.count(1)
    last = 2 * len(TinyBatches(24))
    hook = model.quantizer.scale.register_hook
    hook(lambda gradient: gradient * (math.nan if next(calls) == last else 1.0))
    said = user_error(train, stage_run(tmp_path, model, QATStageConfig(epochs=2), train=TinyBatches(24)))
    assert said.startswith(
        "qat: quantizer.scale of the model is not finite after epoch 2; try a lower qat.lr, from mod"
    )
    assert said.endswith("float.safetensors in another run_dir")
    assert load_checkpoint(tmp_path / "last.pt")["epochs"] == 1


def test_no_whole_batch_is_a_sentence(tmp_path: Path) -> None:
    class Nothing(TinyBatches):
        def __len__(self) -> int:
            return 0

    said = user_error(train, stage_run(tmp_path, tiny_model(), StageConfig(), train=Nothing()))
    assert said == "data.batch_size: 64 leaves no whole training batch; reduce it"


class CountReads(TorchDispatchMode):
    """Counts synchronisations of host and device: item(), bool(), float() here, tolist() by the patch below."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_does_not_wait_for_the_device(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(folder: Path, batch_size: int) -> int:
        stage = QATStageConfig(optimizer=optimizer, clip_grad_norm=1.0, ema_decay=0.9, label_smoothing=0.1)
        batches = TinyBatches(batch_size)
        run = stage_run(folder, tiny_model(), stage, train=batches, config={"log_every": 4, "amp": "bf16"})
        counter, tolist = CountReads(), Tensor.tolist
        with monkeypatch.context() as patch, counter:
            patch.setattr(
                Tensor, "tolist", lambda tensor: (setattr(counter, "reads", counter.reads + 1), tolist(tensor))[1]
            )
            train(run)
        return counter.reads

    base = reads(tmp_path / "a", 24)
    assert reads(tmp_path / "b", 6) == base  # 1 step and 4 steps: one window
    assert reads(tmp_path / "c", 3) == base + 1  # 8 steps: two windows
    assert reads(tmp_path / "d", 2) == base + 2  # 12 steps: three


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", ["fp16", "bf16", "none"])
def test_training_on_cuda_resumes(amp: str, tmp_path: Path) -> None:
    stage = QATStageConfig(epochs=3, lr=0.05, warmup_epochs=0.5, ema_decay=0.7, clip_grad_norm=1.0, freeze_bn_epoch=2)
    fields = {"stage": stage, "device": torch.device("cuda", 0), "config": {"amp": amp}}
    whole = stage_run(tmp_path / "whole", tiny_model(), **fields)
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(stage_run(tmp_path / "cut", tiny_model(), train=TinyBatches(fail_at=(1, 4)), **fields))
    resumed = stage_run(tmp_path / "cut", tiny_model(9), **fields)
    resume(resumed)
    torch.testing.assert_close(dict(resumed.model.state_dict()), dict(whole.model.state_dict()), rtol=1e-2, atol=1e-3)


def test_a_resumed_stage_hides_later_points_of_the_stopped_one_and_no_others(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(4):
            log.scalars("float", "train", {"loss": 1.0}, step)
            log.scalars("qat", "val", {"loss": 1.0}, step)
    with RunLog(tmp_path) as log:
        log.begin("qat", 2)
        for step in (2, 3):
            log.scalars("qat", "val", {"loss": 0.5}, step)
    assert curves(tmp_path) == {
        "float/train/loss": [(step, 1.0) for step in range(4)],
        "qat/val/loss": [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.5)],
    }
    assert len(list((tmp_path / "curves" / "qat" / "val").iterdir())) == 2


def test_a_stage_that_starts_anew_hides_the_curves_of_a_failed_start(tmp_path: Path) -> None:
    for step, value in ((0, 1.0), (5, 1.0), (3, 0.5)):
        with RunLog(tmp_path) as log:
            log.begin("float", 0)
            log.scalars("float", "train", {"loss": value}, step)
    assert curves(tmp_path) == {"float/train/loss": [(3, 0.5)]}
