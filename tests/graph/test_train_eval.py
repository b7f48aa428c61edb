"""Models that depend on train and eval mode: auxiliary heads, dropouts, branches, constants, norms."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth, stochastic_depth

import qat
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, without_quantizers

Outputs = namedtuple("Outputs", "main aux")

GIVES: dict[str, tuple[Callable[[bool, Tensor, Tensor | None], Any], type, type]] = {
    "named tuple": (lambda training, y, aux: Outputs(y, aux) if training else y, Outputs, Tensor),
    "dict": (lambda training, y, aux: {"out": y, "aux": aux} if training else {"out": y}, dict, dict),
    "None in evaluation": (lambda training, y, aux: Outputs(y, aux), Outputs, Outputs),
}


@pytest.mark.parametrize("case", GIVES)
def test_auxiliary_heads_run_in_training_only(case: str) -> None:
    """As GoogLeNet has them."""
    give, in_training, in_evaluation = GIVES[case]

    def forward(self: Any, x: Tensor) -> Any:
        x = self.stem(x)
        aux = self.aux(x) if self.training else None
        return give(self.training, self.fc(F.dropout(x.mean((2, 3)), 0.2, training=self.training)), aux)

    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    aux = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 5))
    net, x = Plain(forward, stem=stem, aux=aux, fc=nn.Linear(4, 5)).eval(), draw(4, 3, 8, 8)
    model = qat.prepare(net, example_inputs=draw(2, 3, 8, 8))
    assert_computes_as(net, model, x)
    passing = without_quantizers(model)
    assert type(passing.train()(x)) is in_training and isinstance(passing.eval()(x), in_evaluation)
    checks.assert_takes_float_state(model, net.state_dict())
    assert "aux.0_quantizer" in checks.activation_quantizers(model) and notes_of(model, LEFT_IN_FLOAT) == {}


def draw_paths(self: Any, x: Tensor) -> Tensor:
    """Stochastic depth as timm writes it."""
    y = self.a(x)
    if self.training:
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        y = y * keep.div_(0.7)
    return self.b(x + y)


def attend(self: Any, x: Tensor) -> Tensor:
    probability = 0.4 if self.training else 0.0
    return F.scaled_dot_product_attention(self.a(x), self.b(x), x, dropout_p=probability)


def linears(**others: nn.Module) -> dict[str, nn.Module]:
    return {**{name: nn.Linear(8, 8) for name in "abc"}, **others}


BY_MODE: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, nn.Module]]] = {
    "F.dropout": (lambda self, x: self.b(F.dropout(self.a(x), 0.5, training=self.training)), linears()),
    "nn.Dropout": (lambda self, x: self.b(self.c(self.a(x))), linears(c=nn.Dropout(0.5))),
    "always dropout": (lambda self, x: self.b(F.dropout(self.a(x), 0.5)), linears()),
    "never dropout": (lambda self, x: self.b(F.dropout(self.a(x), 0.5, training=False)), linears()),
    "F.alpha_dropout": (lambda self, x: self.b(F.alpha_dropout(self.a(x), 0.2, self.training)), linears()),
    "rand in training": (lambda self, x: self.b(self.a(x) * torch.rand(8) if self.training else x), linears()),
    "rrelu": (lambda self, x: self.b(F.rrelu(self.a(x), training=self.training)), linears()),
    "StochasticDepth": (lambda self, x: self.b(x + self.c(self.a(x))), linears(c=StochasticDepth(0.4, "row"))),
    "stochastic_depth": (lambda self, x: self.b(x + stochastic_depth(self.a(x), 0.4, "row", self.training)), linears()),
    "paths": (draw_paths, linears()),
    "attention dropout": (attend, linears()),
    "a layer in evaluation": (lambda self, x: self.a(x) if self.training else self.b(self.a(x)), linears()),
    "a layer in training": (lambda self, x: self.b(self.a(x)) if self.training else self.a(x), linears()),
    "constant": (lambda self, x: self.a(x) * (1.0 if self.training else 5.0), linears()),
    "inner mode": (lambda self, x: self.b(self.a(x)) * (2 if self.b.training else 3), linears()),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_MODE)
def test_what_depends_on_the_mode_is_decided_at_every_call(case: str) -> None:
    torch.manual_seed(0)
    forward, parts = BY_MODE[case]
    net, x = Plain(forward, **parts), draw(6, 8)
    for start in (net.eval(), net.train()):
        model = prepared_alike(start, x)
        assert model.training is start.training
    assert "(the model)" not in notes_of(model, LEFT_IN_FLOAT)
    if case != "always dropout":
        checks.assert_close_to_float(net, model, x)


class Scaled(nn.Module):
    """A block whose forward asks for its own mode."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.scale if self.training else x


@pytest.mark.parametrize("path", ["b", "c", "b.layer", "c.0", "c.2"])
@pytest.mark.parametrize("blocks", ["b", "c"])
def test_a_block_has_a_mode_of_its_own(blocks: str, path: str) -> None:
    """Point 68: a frozen block's branch followed the model."""
    torch.manual_seed(0)
    net = Plain(lambda self, x: self.get_submodule(blocks)(self.a(x)), a=nn.Linear(8, 8), b=Scaled(5.0),
                c=nn.Sequential(Scaled(2.0), nn.ReLU(), Scaled(3.0)))  # fmt: skip
    x = draw(6, 8)
    prepared = qat.prepare(net, example_inputs=x)
    qat.calibrate(prepared, [x])
    for model in (prepared, without_quantizers(prepared)):
        for mode in (True, False):
            for each in (net, model):
                each.train(mode).get_submodule(path).train(not mode)
            if path in ("c.0", "c.2") and blocks == "c":
                with pytest.raises(ValueError, match=r"^forward of each of c\.0, c\.2 asks for its mode, and the"):
                    model(x)
            else:
                assert torch.allclose(model(x), net(x), atol=1e-5 if model is not prepared else 0.3)


def mean_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    if self.training:
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - self.mean


def mean_assigned(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
    return y - self.mean


def norm_by_function(self: Any, x: Tensor) -> Tensor:
    norm = self.c
    x = F.batch_norm(self.a(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
    return self.b(x)


def norm_of_something_else(self: Any, x: Tensor) -> Tensor:
    return self.b(self.c(self.a(x) if self.training else x))


STATISTICS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.batch_norm": norm_by_function,
    "of something else": norm_of_something_else,
    "in training only": lambda self, x: self.b(self.c(self.a(x)) if self.training else self.a(x)),
    "running mean in place": mean_in_place,
    "running mean assigned": mean_assigned,
}


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics_move_in_training_only_and_as_the_float_models_do(case: str) -> None:
    parts = linears(c=nn.BatchNorm1d(8), mean=nn.Buffer(torch.zeros(8)))
    net, x = Plain(STATISTICS[case], **parts).eval(), draw(6, 8)
    model = prepared_alike(net, x)  # buffers too
    qat.calibrate(model, [x])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()(3 * x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_one_norm_for_two_tensors_by_mode_needs_parts_and_says_so() -> None:
    net = Plain(norm_of_something_else, **linears(c=nn.BatchNorm1d(8)))
    model = qat.prepare(net, example_inputs=draw(6, 8))
    assert notes_of(model, LEFT_IN_FLOAT)["(the model)"] == (
        "prepared in parts, since Plain applies c to something else in evaluation than in training, and one graph for"
        " both would update its statistics with both"
    )
