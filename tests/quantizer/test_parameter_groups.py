"""`parameter_groups`: every trainable parameter once, in the group of its kind, with the rate of its bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qat import QuantRecipe, QuantSpec, freeze_scales, parameter_groups, prepare
from qat.quantizer import create_quantizer


class Zoo(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.ln = nn.LayerNorm([4, 2])
        self.gn = nn.GroupNorm(2, 4)
        self.prelu = nn.PReLU(4)
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = nn.Parameter(torch.ones(4, 4))
        self.again = self.tied
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.head.quantizer = create_quantizer(QuantSpec(bits=4, granularity="channel"), "weight", (2, 1))
        affine = QuantSpec(signed=False, symmetric=False, rule="lsq_plus")
        self.outer = nn.ModuleDict({"inner": create_quantizer(affine)})
        self.outer.inner.helper = nn.Linear(1, 1)
        self.outer.shared = self.outer.inner


INNER = ["scale", "zero_point", "helper.weight", "helper.bias"]


def names_of(model: nn.Module, parameters: list[Tensor]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameters]


def test_every_trainable_parameter_is_in_the_right_group_once() -> None:
    model = Zoo()
    groups = parameter_groups(model, 0.2, 0.3, norm_weight_decay=0.4)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("weights", 0.2, 0.3),
        ("norms", 0.2, 0.4),
        ("biases", 0.2, 0.4),
        ("quantizers_8_bits", pytest.approx(0.02), 0.0),
        ("quantizers_4_bits", 0.2, 0.0),
    ]
    assert [names_of(model, g["params"]) for g in groups] == [
        ["layer_scale", "conv.weight", "tied.weight", "head.weight"],
        ["bn.weight", "bn.bias", "ln.weight", "ln.bias", "gn.weight", "gn.bias"],
        ["conv.bias", "prelu.weight", "head.bias"],
        [f"outer.inner.{name}" for name in INNER],
        ["head.quantizer.scale"],
    ]
    torch.optim.AdamW(groups)


def test_without_a_decay_nothing_decays() -> None:
    """Point 26: `weight_decay` had no default, though torch's SGD has one."""
    assert {group["weight_decay"] for group in parameter_groups(Zoo(), 0.1)} == {0.0}


def test_a_factor_of_ones_own_makes_one_group_and_empty_ones_are_left_out() -> None:
    groups = parameter_groups(nn.ModuleList([Zoo().outer, Zoo().head]), 0.2, 0.3, quantizer_lr_factor=0.5)
    assert [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        ("weights", 0.2, 0.3, 1),
        ("biases", 0.2, 0.0, 1),
        ("quantizers", 0.1, 0.0, 5),
    ]


def test_a_rate_and_a_decay_of_their_own_hold_for_all_quantizers() -> None:
    groups = parameter_groups(Zoo().outer, 0.2, 0.3, quantizer_lr=1e-5, quantizer_weight_decay=0.1)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [("quantizers", 1e-5, 0.1)]
    by_bits = parameter_groups(Zoo().outer, 0.2, 0.3, quantizer_weight_decay=0.1)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in by_bits] == [
        ("quantizers_8_bits", pytest.approx(0.02), 0.1)
    ]


def test_frozen_scales_stay_in_their_group_and_those_without_gradient_do_not() -> None:
    model = Zoo()
    before = [names_of(model, g["params"]) for g in parameter_groups(model, 0.1, 0.0)]
    freeze_scales(model)
    assert [names_of(model, g["params"]) for g in parameter_groups(model, 0.1, 0.0)] == before
    freeze_scales(model, False)
    model.head.quantizer.requires_grad_(False)
    assert [g["name"] for g in parameter_groups(model, 0.1, 0.0)][3:] == ["quantizers_8_bits"]


class Reader(nn.Module):
    """Weights that layers own, that functions read from another module, and that stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.read, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.left = nn.LSTM(4, 4, batch_first=True, bias=False), nn.Linear(4, 4)
        self.wide, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(self.own(self.tied(self.wide(self.lstm(x)[0]))), self.read.weight * 2.0)
        x = functional.linear(self.both(x), self.both.weight[:2].repeat(2, 1))
        return self.left(self.attention(x, x, self.normed(x), need_weights=False)[0])


def test_weights_are_in_the_group_of_the_fewest_bits_that_they_are_computed_on() -> None:
    grids = {
        "own": {"weight": {"bits": 3}},
        "wide": {"weight": {"bits": 8}},
        "both": {"weight": {"bits": 1, "rule": "binary"}},
        "left": {"skip": True},
    }
    recipe = QuantRecipe(weight=QuantSpec(bits=2), overrides=grids)
    model = prepare(Reader(), recipe, torch.randn(2, 5, 4))
    groups = {g["name"]: g for g in parameter_groups(model, 0.1, 0.4, weight_decay_by_bits=True)}
    found = {kind: set(names_of(model, group["params"])) for kind, group in groups.items() if kind[:6] == "weight"}
    assert found == {
        "weights": {"left.weight"},
        "weights_3_bits": {"own.weight"},
        "weights_2_bits": {
            "read.weight", "normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1",
            "attention.in_proj_weight", "attention.out_proj.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0",
            "wide.weight",
        },
        "weights_1_bits": {"both.weight"},
    }  # fmt: skip
    assert [groups[kind]["weight_decay"] for kind in found] == [0.4, 0.2, 0.1, 0.1]
    plain = {g["name"]: g for g in parameter_groups(model, 0.1, 0.4)}
    assert set(names_of(model, plain["weights"]["params"])) == set().union(*found.values())


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"lr": -0.1}, "lr must be a number of at least 0, got -0.1"),
        ({"lr": "0.1"}, "lr must be a number of at least 0, got '0.1'"),
        ({"quantizer_lr_factor": -1}, "quantizer_lr_factor must"),
        ({"quantizer_lr": "1e-5"}, "quantizer_lr must"),
        ({"quantizer_weight_decay": -1}, "quantizer_weight_decay must"),
        ({"quantizer_lr": 1e-5, "quantizer_lr_factor": 0.1}, "quantizer_lr_factor=0.1 and quantizer_lr=1e-05"),
    ],
)
def test_wrong_rates_are_refused(given: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parameter_groups(nn.Linear(2, 2), **{"lr": 0.1, "weight_decay": 0.0, **given})
    assert fact in str(refusal.value)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1, 0.0)
