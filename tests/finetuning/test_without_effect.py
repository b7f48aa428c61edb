"""Settings that would change nothing: refused where that is sure, said where the run shows it."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from qat import QuantLinear
from qat.spec import QuantSpec
from qat.training.config.stages import OscillationConfig, QATStageConfig, QuantNoiseConfig, StageConfig
from qat.training.loop.stage import without_effect
from tests.runs.tiny_training import stage_run, tiny_model

SLOW = "its averages are 90 % what the stage starts from; try 0.5"
SAID: list[tuple[dict[str, Any], list[str]]] = [
    ({"epochs": 3, "freeze_bn_epoch": 2, "freeze_scales_epoch": 0, "ema_decay": 0.9}, []),
    ({"epochs": 0, "lr": 0.3, "optimizer": "adamw"}, []),
    ({"epochs": 3, "freeze_bn_epoch": 3}, ["qat.freeze_bn_epoch: 3 has no effect: the last of 3 is 2"]),
    ({"epochs": 3, "freeze_scales_epoch": 7}, ["qat.freeze_scales_epoch: 7 has no effect: the last of 3 is 2"]),
    (
        {"epochs": 1, "optimizer": "adamw", "momentum": 0.5, "accumulate": 6},
        [
            "qat.momentum: 0.5 has no effect: qat.optimizer is adamw, which has none",
            "accumulate: 6 is more than the 5 batches of an epoch; each epoch is one step",
        ],
    ),
    ({"epochs": 2, "ema_decay": 0.99}, [f"ema_decay: 0.99 is slow for the 10 steps of this stage: {SLOW}"]),  # 0.99^10
    (
        {"epochs": 0, "mixup_alpha": 0.2, "warmup_epochs": 1.0},
        ["qat.warmup_epochs, qat.mixup_alpha have no effect: qat.epochs is 0"],
    ),
    ({"epochs": 0, "accumulate": 2}, ["qat.accumulate has no effect: qat.epochs is 0"]),
]


@pytest.mark.parametrize(("stage", "said"), SAID)
def test_the_log_says_what_has_no_effect(stage: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    assert without_effect(stage_run(tmp_path, tiny_model(), QATStageConfig(**stage))) == said


def test_re_estimation_needs_a_norm_and_a_float_stage_has_its_own_keys(tmp_path: Path) -> None:
    stage = StageConfig(epochs=0, bn_reestimate="always", label_smoothing=0.1)
    run = stage_run(tmp_path, nn.Linear(2, 2), stage)
    run.name = "float"
    assert without_effect(run) == [
        "float.bn_reestimate: always has no effect: the model has no BatchNorm",
        "float.label_smoothing has no effect: float.epochs is 0",
    ]
    run.model = tiny_model()
    assert len(without_effect(run)) == 1
    run.name = "float_finetune"  # qat says it
    assert without_effect(run) == []


def test_what_the_whole_run_has_no_use_for_is_said_by_its_last_stage(tmp_path: Path) -> None:
    aids = {"oscillation": OscillationConfig(), "quant_noise": QuantNoiseConfig(share=0.5)}
    run = stage_run(tmp_path, tiny_model(), QATStageConfig(epochs=1, accumulate=5, **aids))
    export = run.config.export.model_copy(update={"onnx": False, "exact_sums": "always", "packed": False})
    quantization = run.config.quantization.model_copy(update={"residual_bits": 6})
    run.config = run.config.model_copy(update={"export": export, "quantization": quantization})
    own = [f"qat.{name} has no effect: the stage has one step" for name in ("quant_noise", "oscillation")]
    assert without_effect(run) == [
        *own,
        "export.exact_sums: always has no effect: export.onnx is false",
        "export.packed: false has no effect: export.onnx is false",
        "quantization.residual_bits: 6 has no effect: nothing in the model reads a residual stream",
    ]
    run.name = "qat_1"
    assert without_effect(run) == []


@pytest.mark.parametrize("quantized", [True, False])
def test_rates_and_decays_of_what_the_model_lacks_have_no_effect(quantized: bool, tmp_path: Path) -> None:
    stage = QATStageConfig(quantizer_optimizer="adamw", quantizer_lr=1e-5, weight_decay_by_bits=True)
    spec = QuantSpec(bits=3 if quantized else 4, rule="lsq" if quantized else "minmax")
    run = stage_run(tmp_path, nn.Sequential(QuantLinear(2, 2, weight_spec=spec, activation_spec=None)), stage)
    keys = [f"qat.{key} has no effect: no quantizer learns" for key in ("quantizer_lr", "quantizer_optimizer")]
    decay = "qat.weight_decay_by_bits has no effect: no weight has fewer than 4 bits"
    assert without_effect(run) == ([] if quantized else [*keys, decay])
    run.stage = stage.model_copy(update={"weight_decay": 0.0})
    assert without_effect(run)[-1].endswith("qat.weight_decay is 0")
