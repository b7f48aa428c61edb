"""A captured float model computes what the model computes: answers, gradients and buffers, in both modes."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.graph.capture import _are_same
from qat.graph.modes import trace
from qat.graph.randomness import seeded
from qat.inputs import bind_inputs
from qat.preparation.prepared_graph import PreparedGraph
from qat.torch_internals import pytree
from tests.references.prepared_case import Plain

Pair = NamedTuple("Pair", [("one", Tensor), ("two", Tensor)])  # noqa: UP014 - as users write it


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


LAYERS = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)}
STATE = {"table": nn.Parameter(torch.zeros(1, 1, 8)), "seen": nn.Buffer(torch.zeros(())), "cache": None, "shape": None}
PARTS: dict[str, Any] = {**LAYERS, **STATE, "drop": nn.Dropout(0.5)}


def cached(net: Any, x: Tensor) -> Tensor:
    if net.shape != x.shape:
        net.shape, net.cache = x.shape, torch.arange(x.shape[-1], dtype=x.dtype) * x.shape[0]
    return net.a(x) + net.cache[:8]  # type: ignore[no-any-return]


def counted(net: Any, x: Tensor) -> Tensor:
    net.seen += 1
    return net.a(x) * net.seen  # type: ignore[no-any-return]


def windows(net: Any, x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % 4, 0, -height % 4))
    x = x.reshape(len(x), 3, x.shape[2] // 4, 4, x.shape[3] // 4, 4).transpose(3, 4).flatten(1)
    return net.a(x[:, :8])  # type: ignore[no-any-return]


def masked(net: Any, x: Tensor) -> Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
    mask[0, 0] = 0
    return torch.softmax(net.a(x) @ net.b(x).transpose(1, 2) + mask, -1)


def written(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z = y[:, 0]
    y[:, 1:] = 0
    y += net.b(x)
    z.mul_(2)
    return y * z.sum()  # type: ignore[no-any-return]


def written_constant(net: Any, x: Tensor) -> Tensor:
    sums = torch.zeros(8)
    sums.add_(x.sum((0, 1)))
    return net.a(x) + sums  # type: ignore[no-any-return]


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.softmax(net.a(x), -1)
    return net.b(x) * weights  # type: ignore[no-any-return]


def by_mode(net: Any, x: Tensor) -> Any:
    y = F.dropout(net.a(x), 0.3, net.training)
    return (y, net.b(y)) if net.training else y


def attended(net: Any, x: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(net.a(x), net.b(x), x, dropout_p=0.1 if net.training else 0.0)
    return F.normalize(y, dim=-1)


def folded(net: Any, x: Tensor) -> Tensor:
    y = F.unfold(net.norm(net.conv(x)), 2, stride=2)
    return F.adaptive_max_pool1d(y, 4) + F.logsigmoid(y[..., :4])


ROWS, IMAGES = torch.randn(3, 5, 8), torch.randn(2, 3, 8, 12)

MODELS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "a cache by shape": (cached, ROWS),
    "a counter that is a buffer": (counted, ROWS),
    "windows": (windows, IMAGES),
    "a mask by finfo": (masked, ROWS),
    "writes into views": (written, ROWS),
    "writes into a constant": (written_constant, ROWS),
    "no_grad": (without_gradients, ROWS),
    "another answer in training": (by_mode, ROWS),
    "attention": (attended, ROWS),
    "patches and pools": (folded, IMAGES),
    "zeros by the batch": (lambda net, x: net.a(x) + torch.zeros(x.shape[0], 1, 8), ROWS),
    "a token by the batch": (lambda net, x: torch.cat([net.table.expand(len(x), -1, -1), net.a(x)], 1), ROWS),
    "numpy's constants": (lambda net, x: net.a(x) * float(np.sqrt(8)) + torch.from_numpy(np.arange(8.0)).float(), ROWS),
    "sizes as numbers": (lambda net, x: net.a(x) / math.sqrt(x.shape[-1]) + x.numel() // len(x), ROWS),
    "dropouts": (lambda net, x: net.drop(F.dropout1d(net.a(x), 0.4, net.training)), ROWS),
    "nested lists": (lambda net, x: [net.a(x), {"one": (net.b(x), [x + 1])}], ROWS),
    "a named tuple": (lambda net, x: Pair(net.a(x), net.b(x)), ROWS),
    "a dataclass": (lambda net, x: Answer(net.a(x), (net.b(x),)), ROWS),
    "a size in the answer": (lambda net, x: (net.a(x), x.shape[0]), ROWS),
    "einsum": (lambda net, x: torch.einsum("nij,nkj->nik", net.a(x), net.b(x)), ROWS),
    "resized": (lambda net, x: F.interpolate(net.conv(x), size=x.shape[-2:], mode="bilinear", antialias=True), IMAGES),
    "resized by a factor": (lambda net, x: F.interpolate(net.conv(x), scale_factor=2.0, mode="nearest"), IMAGES),
    "losses": (lambda net, x: F.smooth_l1_loss(net.a(x), x) + F.cross_entropy(net.b(x)[:, 0], x[:, 0].argmax(1)), ROWS),
    "a view of a norm": (lambda net, x: net.conv(net.norm(x).view(len(x), -1).view(x.shape)), IMAGES.transpose(2, 3)),
    "split": (lambda net, x: net.a(F.pad(x.split([3, 5], -1)[1], (0, 3))) + net.b(x).chunk(2, 1)[0].sum(), ROWS),
}  # fmt: skip


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Answer):
        value = vars(value)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, int))]


def captured(model: nn.Module, inputs: Any) -> PreparedGraph:
    own = copy.deepcopy(model)
    return trace(own, bind_inputs("trace", own, inputs), PreparedGraph).train(model.training)


def step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The answer, the gradients and the buffers of a step."""
    with seeded(3):
        answer = model(*args, **kwargs)
    answers = leaves(answer)
    model.zero_grad()
    tensors = [each for each in answers if isinstance(each, Tensor) and each.requires_grad]
    if tensors:
        sum((each * torch.linspace(0, 1, each.numel()).view_as(each)).sum() for each in tensors).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return type(answer), answers, gradients, dict(model.state_dict())


def expect_equal(ours: tuple[Any, ...], theirs: tuple[Any, ...], exact: bool = True) -> None:
    assert ours[0] is theirs[0]
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        if isinstance(mine, dict):
            assert mine.keys() == other.keys()
            mine, other = [mine[key] for key in other], list(other.values())
        for one, two in zip(mine, other, strict=True):
            if isinstance(one, Tensor):  # attention is taken apart, in other roundings
                torch.testing.assert_close(one, two, rtol=1e-5 * (not exact), atol=1e-6 * (not exact))
            else:
                assert one == two


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_model_is_the_model_to_the_bit(name: str, training: bool) -> None:
    body, x = MODELS[name]
    model = Plain(body, **PARTS).train(training)
    graph = captured(model, x)
    for samples in (len(x), 1, 4):
        batch = torch.randn(samples, *x.shape[1:])
        graph.load_state_dict(model.state_dict())
        expect_equal(step(graph, (batch.clone(),), {}), step(model, (batch.clone(),), {}), exact=name != "attention")


@pytest.mark.parametrize("name", ["windows", "patches and pools", "resized", "resized by a factor", "a cache by shape"])
def test_height_and_width_are_free(name: str) -> None:
    body, x = MODELS[name]
    model = Plain(body, **PARTS).eval()
    graph = captured(model, x)
    other = torch.randn(3, *x.shape[1:-2], 12, 8) if x.dim() == 4 else torch.randn(3, 7, 8)
    expect_equal(step(graph, (other,), {}), step(model, (other,), {}))


def by_size(net: Any, x: Tensor) -> Tensor:
    if net.shape != x.shape[0] * x.shape[1]:
        net.shape, net.cache = x.shape[0] * x.shape[1], torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    return net.a(x) + net.cache  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [cached, by_size])
@pytest.mark.parametrize("warm", [1, 2, 7])
def test_a_cache_by_shape_that_is_warm_fixes_no_size(body: Callable[..., Any], warm: int) -> None:
    model = Plain(body, **PARTS).eval()
    model(torch.randn(warm, 5, 8))
    graph = captured(model, torch.randn(2, 5, 8))
    for shape in ((warm, 5, 8), (4, 5, 8), (3, 6, 8), (1, 5, 8)):
        x = torch.randn(shape)
        expect_equal(step(graph, (x,), {}), step(model, (x,), {}))


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "arguments without names": (lambda net, *xs: net.a(xs[0]) + net.b(xs[1]), (ROWS, ROWS), {}),
    "arguments by name": (lambda net, **xs: net.a(xs["one"]) + net.b(xs["two"]), (), {"one": ROWS, "two": ROWS}),
    "a dictionary": (lambda net, x: net.a(x["one"]) + net.b(x["more"][0]), ({"one": ROWS, "more": [ROWS]},), {}),
    "words": (lambda net, **xs: net.a(xs["x"]) * xs["n"] if xs["how"] else 0, (), {"x": ROWS, "how": "a", "n": 3}),
    "a named tuple": (lambda net, x: net.a(x.one) + x.two, (Pair(ROWS, ROWS),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_what_the_model_takes(name: str) -> None:
    body, args, kwargs = CALLS[name]
    model = Plain(body, **PARTS)
    graph = captured(model, kwargs or args)
    expect_equal(step(graph, args, kwargs), step(model, args, kwargs))


@pytest.mark.parametrize(("small", "same"), [(1.2e-4, True), (1e-3, False), (math.nan, False)])
def test_sums_in_another_order_are_the_same(small: float, same: bool) -> None:
    """On two threads raft_small, whose flows reach 20, went in parts: its smallest values differed by 1e-5."""
    assert _are_same([torch.tensor([20.0, math.inf, small])], [torch.tensor([20.0, math.inf, 1e-4])]) is same


def test_labels_may_be_left_out() -> None:
    def body(net: Any, x: Tensor, labels: Tensor | None = None) -> Answer:
        logits = net.a(x.mean(1))
        return Answer(logits, loss=None if labels is None else F.cross_entropy(logits, labels))

    model, labels = Plain(body, **PARTS), torch.tensor([0, 4, 2])
    graph = captured(model, {"x": ROWS, "labels": labels})
    for kwargs in ({"x": ROWS, "labels": labels}, {"x": ROWS}):
        expect_equal(step(graph, (), kwargs), step(model, (), kwargs))
    assert graph(ROWS).loss is None


def test_what_forward_calls_stays_though_no_one_reads_its_result() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        net.norm(x)
        net.drop(x)
        return net.conv(x)  # type: ignore[no-any-return]

    model, seen = Plain(body, **PARTS).train(), list[Any]()
    graph = captured(model, IMAGES)
    graph(IMAGES)
    assert int(graph.norm.num_batches_tracked) == 1 and not torch.equal(graph.norm.running_mean, torch.zeros(3))
    graph.drop.register_forward_hook(lambda *given: seen.append(given))
    graph(IMAGES)
    assert len(seen) == 1


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.Mish])
def test_a_tensor_written_in_place_goes_on_as_the_result(activation: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        y = x + 0
        net.act(y)
        return net.conv(y) * y  # type: ignore[no-any-return]

    model = Plain(body, **PARTS, act=activation(inplace=True))
    graph = captured(model, IMAGES)
    (call,) = [node for node in graph.graph.nodes if node.target == "act"]
    assert len(call.users) == 2 and len(call.args[0].users) == 1
    expect_equal(step(graph, (IMAGES.clone(),), {}), step(model, (IMAGES.clone(),), {}))


def test_a_copy_that_is_written_is_not_the_input() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        y = x.reshape(2, 3, 1, 8, 12).transpose(1, 2).contiguous().reshape(x.shape)
        return net.conv(y.relu_()) + x  # type: ignore[no-any-return]

    images = IMAGES.to(memory_format=torch.channels_last)
    model = Plain(body, **PARTS)
    graph, given = captured(model, IMAGES), images.clone()
    torch.testing.assert_close(graph(given), model(images.clone()), rtol=0, atol=0)
    assert torch.equal(given, images)
