"""Point 56: the library checks the types of settings as the YAML does, and says what would be right."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Optional

import pytest
import torch
from torch import nn

import qat
from qat.finetuning import EMA, Distillation, GradualQuantization, Oscillations
from qat.post_training import AdaRound, CrossLayerEqualization, QDrop
from qat.targets import profile_of
from qat.text import check_types

PROFILE = profile_of("onnxruntime")
LIMITS = PROFILE.weight_limits
MODEL = qat.prepare(nn.Sequential(nn.Linear(4, 4)), qat.QuantRecipe({"bits": 4}), torch.randn(2, 4))

WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (partial(replace, PROFILE), {"float_biases": 1}, "TargetProfile: float_biases must be true or false"),
    (partial(replace, PROFILE), {"weight": {"bits": 8}}, "TargetProfile: weight must be a QuantSpec, got"),
    (partial(replace, PROFILE), {"shared_grids": {"cat"}}, "TargetProfile: shared_grids must be a frozenset"),
    (partial(replace, PROFILE), {"fixed_grids": {"tanh": 3}}, "TargetProfile: fixed_grids must be a mapping"),
    (partial(replace, LIMITS), {"most_bits": "8"}, "GridLimits: most_bits must be a whole number, got '8'"),
    (partial(replace, LIMITS), {"granularities": ("row",)}, "GridLimits: granularities must be a tuple"),
    (AdaRound, {"iterations": "10"}, "AdaRound: iterations must be a whole number, got '10'"),
    (QDrop, {"drop": True}, "QDrop: drop must be a number, got True"),
    (CrossLayerEqualization, {"rounds": 2.5}, "CrossLayerEqualization: rounds must be a whole number, got 2.5"),
    (EMA, {"model": MODEL, "decay": "0.9"}, "EMA: decay must be a number, got '0.9'"),
    (Oscillations, {"model": MODEL, "freeze": "yes"}, "Oscillations: freeze must be a number or None, got 'yes'"),
    (GradualQuantization, {"model": MODEL, "weight_share": True}, "GradualQuantization: weight_share must be a number"),
    (Distillation, {"teacher": MODEL, "features": {"0": "x"}}, "Distillation: features must be a mapping or None, got"),
    (qat.freeze_scales, {"model": MODEL, "frozen": "no"}, "freeze_scales: frozen must be true or false, got 'no'"),
    (qat.freeze_batch_norm, {"model": MODEL, "frozen": 0}, "freeze_batch_norm: frozen must be true or false, got 0"),
    (qat.disable_fake_quant, {"model": MODEL, "weights": "no"}, "disable_fake_quant: weights must be true or false"),
    (
        partial(qat.parameter_groups, MODEL, 0.1),
        {"weight_decay_by_bits": "no"},
        "parameter_groups: weight_decay_by_bits must be true or false",
    ),
    (partial(qat.calibrate, MODEL, []), {"limit": "1"}, "calibrate: limit must be a whole number or None, got '1'"),
]


@pytest.mark.parametrize(("call", "given", "said"), WRONG)
def test_a_setting_of_the_wrong_type_is_refused(call: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        call(**given)
    assert str(refusal.value).startswith(said)


def test_what_fits_passes() -> None:
    def f(a: float, b: Optional[int], c: Literal["x"] | None, d: tuple[bool, ...], e: Any, g: bool = True) -> None: ...  # noqa: UP045

    for given in ({"a": 1, "b": None, "c": "x", "d": (True,)}, {"a": 0.5, "b": 3, "c": None, "d": (), "e": True}):
        check_types(f, given)
    for wrong in ({"a": "1"}, {"b": 1.0}, {"c": "y"}, {"d": (1,)}, {"g": None}):
        with pytest.raises(ValueError, match=f"f: {next(iter(wrong))} must be "):
            check_types(f, wrong)
