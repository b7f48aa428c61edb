"""Progressive bit-widths: the stages before the last, what they hand on, and resuming in the middle of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.quantizer import Quantizer
from qat.training.config.file import load_config
from qat.training.loop.evaluation import EPOCH_OFFSET
from qat.training.loop.stage import float_counterpart, on_grids_of, rate_key, training_of
from qat.training.run import stages
from qat.training.script import CONFIGS
from tests.runs import small_run
from tests.runs.small_run import summary

PROGRESSIVE = "qat.progressive=[{bits: 8, epochs: 2}, {bits: 6, weight: {rule: minmax}, lr: 0.02}]"


def start(*arguments: str) -> int:
    return small_run.start(PROGRESSIVE, "quantization.first_bits=8", *arguments)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if "quantizer" not in name}


def test_each_stage_has_its_grids_and_starts_from_the_weights_of_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = stages.train_stage, list[tuple[Any, ...]]()

    def watched(run: stages.StageRun, state: Any = None) -> Any:
        specs = [module.spec for module in run.model.modules() if isinstance(module, Quantizer)]
        bits = {spec.bits for spec in specs}, {spec.rule for spec in specs}
        before = weights_of(run.model)
        evaluation = real(run, state)
        seen.append((run.name, bits, run.stage.epochs, run.stage.lr, before, weights_of(run.model)))
        return evaluation

    monkeypatch.setattr(stages, "train_stage", watched)
    assert start("run_dir=run", "float_finetune=true") == 0
    assert [each[:4] for each in seen] == [
        ("float", (set(), set()), 1, 0.05),
        ("float_finetune", (set(), set()), 5, 0.01),
        ("qat_1", ({8}, {"lsq"}), 2, 0.01),
        ("qat_2", ({8, 6}, {"lsq", "minmax"}), 1, 0.02),
        ("qat", ({8, 4}, {"lsq"}), 2, 0.01),
    ]
    for earlier, later in ((seen[0], seen[2]), (seen[2], seen[3]), (seen[3], seen[4])):
        assert all(torch.equal(value, later[4][name]) for name, value in earlier[5].items())
        assert not all(torch.equal(value, later[5][name]) for name, value in earlier[5].items())


@pytest.mark.parametrize(("stage", "epoch"), [("float", 1), ("qat_1", 1), ("qat", 0)])
def test_a_run_stopped_in_any_stage_ends_as_if_it_had_not_been(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, epoch: int
) -> None:
    orders: dict[str, list[int]] = {}

    def train_stage(run: stages.StageRun, state: Any = None) -> Any:
        set_epoch = run.train.set_epoch

        def watched(number: int, first: int = 0) -> None:
            if stop and run.name == stage and number == run.epochs_before + epoch:
                raise KeyboardInterrupt
            if number < EPOCH_OFFSET:  # no batches of re-estimation
                orders.setdefault(run.name, []).append(number)
            set_epoch(number, first)

        run.train.set_epoch = watched  # type: ignore[method-assign]
        try:
            return real(run, state)
        finally:
            run.train.set_epoch = set_epoch  # type: ignore[method-assign]

    real, stop = stages.train_stage, False
    monkeypatch.setattr(stages, "train_stage", train_stage)
    assert start("run_dir=whole", "float.epochs=2") == 0
    assert (orders["qat_1"], orders["qat_2"], orders["qat"]) == ([0, 1], [2], [3, 4])  # no order of images twice
    stop = True
    assert start("run_dir=parts", "float.epochs=2") == 130
    stop = False
    assert start("run_dir=parts", "float.epochs=2", "resume=auto") == 0
    whole, parts = (torch.load(folder / name / "last.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["model"].keys() == parts["model"].keys()
    assert all(torch.equal(value, parts["model"][key]) for key, value in whole["model"].items())
    found = [summary(folder / name) for name in ("whole", "parts")]
    assert all(found[0][key] == found[1][key] for key in ("float", "calibrated", "qat"))


def test_a_stage_leaves_what_it_does_not_name_as_it_is(folder: Path) -> None:
    extra = ["qat.freeze_bn_epoch=1", "qat.freeze_scales_epoch=1", "qat.warmup_epochs=2"]
    extra += ["quantization.weight.init=mse", "qat.distillation={}", "qat.oscillation={}"]
    config = load_config("tiny.yaml", [PROGRESSIVE, *extra])
    first, second = config.qat.progressive
    grids = on_grids_of(config, second).quantization
    assert (grids.weight.bits, grids.weight.rule, grids.weight.init) == (6, "minmax", "mse")
    assert (grids.activation.bits, grids.activation.rule) == (6, None)
    assert config.quantization.weight.bits == 4
    training = training_of(config.qat, second)
    assert (training.epochs, training.lr, training.warmup_epochs, training.freeze_bn_epoch) == (1, 0.02, 1, None)
    assert training.freeze_scales_epoch is None
    assert training_of(config.qat, first).lr == config.qat.lr and training.oscillation is None
    assert float_counterpart(config.qat).epochs == 5 and float_counterpart(config.qat).distillation is None
    assert config.qat.oscillation is not None and float_counterpart(config.qat).oscillation is None


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[{bits: 6}, {weight: {rule: nothing}}]", "qat.progressive[1]: quantization.weight.rule: "),
        ("[{weight: {bits: 4, granularity: group}}]", "qat.progressive[0]: quantization.weight: "),
        ("[{activation: {rule: xnor}}]", "qat.progressive[0]: "),
    ],
)
def test_what_is_wrong_with_a_stage_shows_before_anything_is_trained(
    stages: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_run.refusal(capsys, f"qat.progressive={stages}").startswith(said)


def test_a_stage_before_the_last_need_not_be_exported(folder: Path) -> None:
    """Ten bits do not fit the runtime's integers."""
    wide = "qat.progressive=[{bits: 10, lr: 0.003}]"
    assert small_run.start("run_dir=run", wide, "export.onnx=true", "qat.epochs=1") == 0


def test_advice_names_the_key_of_the_stage() -> None:
    config = load_config("resnet_int8.yaml", ["qat.progressive=[{bits: 8}, {bits: 6, lr: 0.1}]"], CONFIGS)
    keys = [rate_key(config, name) for name in ("float", "float_finetune", "qat_1", "qat_2", "qat")]
    assert keys == ["float.lr", "qat.lr", "qat.lr", "qat.progressive[1].lr", "qat.lr"]
