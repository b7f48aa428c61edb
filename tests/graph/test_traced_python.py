"""Python in forward beyond tensor operations: autograd Functions, random numbers, counters, type checks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qat
from qat.graph.randomness import python_state
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, without_quantizers


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(tensors: list[Tensor], x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0] / 2


reverse: Callable[[Tensor], Tensor] = Reverse.apply


def with_hook(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: -gradient)
    return x


def in_parts(model: nn.Module) -> str:
    return notes_of(model, LEFT_IN_FLOAT).get("(the model)", "")


def net_with(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Plain(lambda self, x: self.b(function(self.a(x).relu())), a=nn.Linear(8, 8), b=nn.Linear(8, 4))


def prepared(net: nn.Module, x: Tensor) -> nn.Module:
    return qat.prepare(net, example_inputs=x)


OWN_GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "function": (lambda x: Reverse.apply(x), "Reverse"),
    "function with a list": (lambda x: Halve.apply([x], x), "Halve"),
    "vmap": (torch.func.vmap(torch.relu), "forward calls torch.vmap"),
    "hook": (with_hook, "asks a tensor for requires_grad (test_traced_python.py, line "),
    "is_grad_enabled": (lambda x: x if torch.is_grad_enabled() else -x, "return different outputs"),
    "item": (lambda x: x if x.sum().item() > 0 else -x, "the values of a tensor (test_traced_python.py, line "),
    "numpy": (lambda x: x + torch.from_numpy(x.detach().numpy()), "a tensor for numpy (test_traced_python.py, line "),
    "made of": (lambda x: torch.Tensor._make_subclass(torch.Tensor, x), "makes a tensor in a way that is not recorded"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", OWN_GRADIENTS)
def test_what_no_graph_keeps_is_prepared_in_parts_and_keeps_its_gradient(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    function, reason = OWN_GRADIENTS[case]
    net, x = net_with(function), draw(5, 8)
    model = prepared(net, x)
    assert reason in in_parts(model) and "def forward" not in capfd.readouterr().err  # torch prints its whole graph
    found = []
    for each in (net, without_quantizers(model)):
        given = x.clone().requires_grad_()
        y = each(given)
        y.square().sum().backward()
        found.append((y.detach(), given.grad))
    torch.testing.assert_close(found[0], found[1])


TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "as_tensor": lambda x: torch.as_tensor(x) + torch.as_tensor(x.shape[1]),
    "checkpoint": lambda x: checkpoint(torch.relu, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sigmoid, x, use_reentrant=True),
    "an item": lambda x: x * x.detach().amax().item(),
    "numpy's numbers": lambda x: np.float64(2) * x + x * np.float32(3) + np.int64(1),
    "numpy on sizes": lambda x: x / np.sqrt(x.shape[1]) + x.reshape(-1, np.prod(x.shape[1:])),
    "random": lambda x: x * torch.rand_like(x) + torch.rand(x.shape) + torch.rand(8),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", TRACED)
def test_what_a_graph_keeps_is_in_it_for_other_batches_too(case: str) -> None:
    net, x = net_with(TRACED[case]), draw(5, 8)
    model = prepared(net, x)
    assert not in_parts(model)
    for size in (5, 3, 1):
        assert_computes_as(net, model, draw(size, 8, seed=1))


def test_an_operation_that_fails_and_is_caught_leaves_nothing_in_the_graph() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return x.view(3, 7, 5)
        except RuntimeError:
            return 2 * x

    assert not in_parts(prepared_alike(net_with(careful), draw(5, 8)))


CHANCE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x if torch.rand(1).item() < 0.5 else -x,
    lambda x: x if random.random() < 1e-9 else -x,  # a rare decision
    lambda x: x * random.random(),
    lambda x: x * np.random.rand(),
]


@pytest.mark.parametrize("function", CHANCE)
def test_what_is_drawn_beside_the_graph_is_drawn_at_every_call(function: Callable[[Tensor], Tensor]) -> None:
    assert in_parts(prepared(net_with(function), draw(5, 8)))


def test_the_random_numbers_of_the_user_go_on_as_if_nothing_had_been_drawn() -> None:
    for function in (lambda x: x * torch.rand(8), lambda x: x * torch.rand_like(x) * random.random(), torch.relu):
        net = net_with(function)
        state = torch.get_rng_state(), python_state()
        prepared(net, draw(5, 8))
        assert torch.equal(torch.get_rng_state(), state[0]) and python_state() == state[1]


def counting(start: Any, step: Callable[[Any], Any] | None) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.width = x.shape[1]  # only a log
        if step is not None:
            self.steps = step(self.steps)
        return self.fc(x)

    return Plain(forward, fc=nn.Linear(8, 4), steps=start, width=0)


COUNTERS: list[tuple[Any, Callable[[Any], Any]]] = [
    (0, lambda number: number + 1), (False, lambda done: not done), ("a", lambda name: name + "a"),
    ([], lambda seen: [*seen, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("start", "step"), COUNTERS)
def test_a_model_that_counts_goes_on_counting(start: Any, step: Any) -> None:
    model = prepared(counting(start, step), draw(2, 8))
    assert "steps" in in_parts(model)
    assert model.steps == start
    free = without_quantizers(model)
    free(draw(2, 8))
    assert free.steps == step(start)


def test_a_note_that_nobody_reads_is_no_reason() -> None:
    assert not in_parts(prepared(counting(0, None), draw(2, 8)))


@pytest.mark.parametrize("names", [("_graph", "b"), ("self", "b"), ("else", "if")])
def test_parts_may_have_names_that_a_graph_has_other_uses_for(names: tuple[str, str]) -> None:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(8, 8))
    said = in_parts(prepared_alike(net, draw(5, 8)))
    assert "rename it" in said and repr(names[0]) in said


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_compiled_parts_are_refused_and_scripted_ones_stay() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled: Any = torch.compile(inner, backend="eager")
    with pytest.raises(ValueError, match="'0' is a torch"):
        prepared(nn.Sequential(compiled, nn.Linear(8, 4)), draw(5, 8))
    net = nn.Sequential(torch.jit.trace(inner, draw(5, 8)), nn.Linear(8, 4))
    model = prepared(net, draw(5, 8))
    assert "ScriptModule" in in_parts(model)
    torch.testing.assert_close(without_quantizers(model)(draw(5, 8)), net(draw(5, 8)))


def balanced(self: Any, x: Tensor) -> Tensor:
    """A layer that leaves a loss behind, as mixtures of experts do."""
    y: Tensor = self.fc(x).relu()
    self.balance, self.seen = y.square().mean(), y.shape[0]
    return y


@pytest.mark.parametrize("balance", [0.0, torch.zeros(())], ids=["number", "tensor"])
def test_a_tensor_that_forward_leaves_behind_is_named(balance: Any, caplog: pytest.LogCaptureFixture) -> None:
    prepared(nn.Sequential(Plain(balanced, fc=nn.Linear(8, 4), balance=balance)), draw(5, 8))
    assert [each for each in caplog.messages if "writes" in each] == [
        "forward of Sequential writes 0.balance, which a prepared model does not keep: let it return what others read"
        " of it"
    ]


def test_a_checkpoint_around_a_prepared_model_and_a_complex_parameter_train() -> None:
    net = Plain(lambda self, x: self.b(self.a(x)) + self.w.abs(), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    net.w = nn.Parameter(torch.randn(8, dtype=torch.cfloat))
    x, model = torch.randn(4, 8), qat.prepare(net, example_inputs=torch.randn(4, 8))
    qat.calibrate(model, [x])
    model.train()(x).sum().backward()
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert before and all(map(torch.equal, before, (p.grad for p in model.parameters() if p.grad is not None)))
