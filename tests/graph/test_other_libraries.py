"""What modules of timm and transformers do besides computing, on stand-ins: what changes nothing splits no model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references.prepared_case import Plain, assert_computes_as, calls, draw, prepared_alike


def reason(model: nn.Module) -> str | None:
    return notes_of(model, LEFT_IN_FLOAT).get("(the model)")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.cache: dict[str, Tensor] = {}
        self.counts = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x))


class ClearsACache(Base):
    """As timm's LeViT keeps the biases of its attention in evaluation, and forgets them in train()."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.cache:
            self.cache = {}
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(self.a(x)) + self.a.bias.relu()
        if "bias" not in self.cache:
            self.cache["bias"] = self.a.bias.relu()
        return self.norm(self.a(x)) + self.cache["bias"]


class FreezesItsNorm(Base):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self


class MergesInEval(Base):
    def eval(self) -> Any:
        super().eval()
        with torch.no_grad():
            self.a.bias.fill_(0)
        return self

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        with torch.no_grad():
            self.a.bias.fill_(1)
        return self


@pytest.mark.parametrize("run_before", [False, True])
def test_a_train_that_changes_nothing_else_does_not_split_a_model(run_before: bool) -> None:
    net, x = ClearsACache().eval(), draw(6, 8)
    if run_before:
        with torch.no_grad():
            net(x)
    model = qat.prepare(net, example_inputs=x)
    assert reason(model) is None
    with torch.no_grad():  # nothing of the float model's cache is left in the graph
        model.a.bias.add_(1)
        net.a.bias.add_(1)
    net.train().eval()
    assert_computes_as(net, model, x)


@pytest.mark.parametrize(("kind", "changed"), [(FreezesItsNorm, "norm.training"), (MergesInEval, "a.bias")])
def test_a_train_that_changes_something_is_named(kind: type[Base], changed: str) -> None:
    model = qat.prepare(kind().eval(), example_inputs=draw(6, 8))
    assert f"{kind.__name__} overrides train() or eval(), which changes {changed}" in str(reason(model))


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        return self.norm(self.a(x)) if self.counts < 100 else x


def test_a_number_that_forward_reads_and_changes_still_splits_a_model() -> None:
    assert "forward reads and changes counts" in str(reason(qat.prepare(Counts().eval(), example_inputs=draw(6, 8))))


def drop_path(self: Any, x: Tensor) -> Tensor:
    """Written like timm.layers.DropPath."""
    if self.drop_prob == 0.0 or not self.training:
        return x
    keep = 1 - self.drop_prob
    return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_what_rests_in_evaluation_is_called_by_mode_and_copies_nothing(probability: float) -> None:
    drop = Plain(drop_path, drop_prob=probability)
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "drop": drop}
    net = Plain(lambda self, x: self.norm(self.b(x + self.drop(self.a(x)))), **parts).eval()
    model = prepared_alike(net, draw(6, 8))
    assert reason(model) is None and calls(model).count("b") == 1 and ("drop" in calls(model)) == (probability > 0)


def test_masks_that_python_joins_are_no_writes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.drop(self.norm(x))
        places = torch.arange(8, device=y.device)[None]
        seen = places.new_ones((), dtype=torch.bool) & (places >= 0)
        return self.a(y).masked_fill(~seen, 0.0) + self.b(y)

    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "drop": nn.Dropout(0.1)}
    assert reason(prepared_alike(Plain(forward, **parts).eval(), draw(6, 8))) is None


class HooksItself(Base):
    """As transformers, which installs hooks that collect results in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.norm.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.hooked = True
        self.seen: list[Tensor] = []
        y = super().forward(x)
        return y if len(self.seen) < 2 else torch.stack(self.seen).sum(0)


def test_hooks_that_forward_installs_are_undone() -> None:
    net, x, base = HooksItself().eval(), draw(6, 8), Base().eval()
    base.load_state_dict(net.state_dict())
    assert_computes_as(base, qat.prepare(net, example_inputs=x), x)
