"""Options of `prepare`: first and last bits, overrides by class and subtree, dry runs; and what `summary` prints."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qat
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from tests.references.prepared_case import Net, Plain, draw, input_grid, refused


class BranchesOnValues(nn.Module):
    """Only its parts can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.attend, self.lstm = nn.MultiheadAttention(4, 2), nn.LSTM(4, 3)
        self.head, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).flatten(2).permute(2, 0, 1)
        if y.sum() > 1e9:
            y = -y
        return self.head(self.lstm(self.attend(y, y, y)[0])[0])


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4) for name in names}


def weight_bits(model: nn.Module) -> dict[str, int]:
    return {n: m.weight_quantizer.spec.bits for n, m in model.named_modules() if isinstance(m, QuantLayer)}


def input_bits(model: fx.GraphModule, name: str) -> int:
    return input_grid(model, name).spec.bits


X = draw(3, 4, 4)
SKIP = {"skip": True}

# Forward, parts, overrides -> the layer of first_bits (5) and the one of last_bits (3).
ENDS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, nn.Module], dict[str, Any], list[str], list[str]]] = {
    "in the order in which they run": (
        lambda self, x: self.a(torch.relu(self.b(torch.relu(self.c(x))))), linears("a", "b", "c"), {}, ["c"], ["a"],
    ),
    "skipped layers do not count": (
        lambda self, x: self.a(self.b(self.c(self.d(x)))), linears("a", "b", "c", "d"),
        {"d": SKIP, "type:Linear": {}, "a": SKIP}, ["c"], ["b"],
    ),
    "weights that functions read": (
        lambda self, x: F.linear(self.b(F.linear(x, self.c.weight, self.c.bias)), self.a.weight[:2]),
        linears("a", "b", "c"), {}, ["c"], ["linear"],
    ),
    "a layer that is called first and last is the first": (
        lambda self, x: self.a(self.b(self.a(x))), linears("a", "b"), {}, ["a"], [],
    ),
    "products of attention": (
        lambda self, x: self.attend(x, x, x, need_weights=False)[0],
        {"attend": nn.MultiheadAttention(4, 2, batch_first=True)}, {}, ["attend.query_projection"],
        ["attend.out_proj"],
    ),
    "products of an LSTM": (
        lambda self, x: self.a(self.b(self.lstm(x)[0])), {"lstm": nn.LSTM(4, 4), **linears("a", "b")}, {},
        ["lstm.product_ih_l0", "lstm.product_hh_l0"], ["a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_first_and_last_bits(case: str) -> None:
    forward, parts, overrides, first, last = ENDS[case]
    net = Plain(forward, **parts).eval()
    model = qat.prepare(net, qat.QuantRecipe(overrides=overrides, first_bits=5, last_bits=3), X)
    found = weight_bits(model)
    wanted = dict.fromkeys(found, 8) | dict.fromkeys(last, 3) | dict.fromkeys(first, 5)
    assert found == wanted and set(first + last) <= set(found)
    for name, bits in ((name, bits) for names, bits in ((first, 5), (last, 3)) for name in names):
        layer = model.get_submodule(name)
        own = getattr(layer, "input_quantizer", None)
        # Other consumers read that tensor with 8 bits.
        shared = "attend.query" in name or "called first and last" in case
        assert shared or (input_bits(model, name) if own is None else own.spec.bits) == bits


DECIDES = BranchesOnValues.forward.__code__.co_firstlineno + 2
REASON = (
    "BranchesOnValues cannot be captured: the way through it depends on the values of a tensor"
    f" (test_prepare_options.py, line {DECIDES}); torch.where(condition, a, b) takes both ways"
)


@pytest.mark.parametrize("name", ["first_bits", "last_bits"])
def test_a_model_in_parts_has_no_first_layer(name: str) -> None:
    with refused(f"prepare: {name}=4 needs a model with one graph, and {REASON}; use overrides"):
        qat.prepare(BranchesOnValues(), qat.QuantRecipe(**{name: 4}), draw(2, 3, 6, 6))


WHOLE: dict[str, tuple[Callable[[], nn.Module], Tensor, qat.QuantRecipe]] = {
    "other bits": (Net, draw(2, 3, 8, 8), qat.QuantRecipe(overrides={"block": SKIP}, first_bits=4)),
    "in parts": (BranchesOnValues, draw(2, 3, 6, 6), qat.QuantRecipe()),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_dry_run_returns_the_table_and_changes_nothing(case: str) -> None:
    make, x, recipe = WHOLE[case]
    net = make().train()
    wanted = qat.summary(qat.prepare(net, recipe, x))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    kinds = {name: type(module) for name, module in net.named_modules()}
    attributes = set(vars(net))
    given, random = x.clone(), torch.random.get_rng_state()
    assert qat.prepare(net, recipe, x, dry_run=True) == wanted
    assert torch.equal(torch.random.get_rng_state(), random) and torch.equal(given, x)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert {name: type(module) for name, module in net.named_modules()} == kinds and set(vars(net)) == attributes
    assert all(module.training for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def rows(text: str) -> dict[str, list[str]]:
    """Name to the cells of its row, without the header and the counts."""
    table = text.split("\n\n")[0].splitlines()[1:]
    cells = [re.split(r"\s{2,}", line.strip()) for line in table]
    assert len({row[0] for row in cells}) == len(cells), "a name twice"
    return {row[0]: row[1:] for row in cells}


class AllKinds(nn.Module):
    """Layers of every kind, quantized or not, and parameters that functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.gain = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.skipped, self.pair, self.head = nn.Linear(8, 8), nn.Bilinear(8, 8, 4), nn.Linear(4, 2)
        self.unused, self.deep = nn.Linear(3, 3), nn.ModuleDict({"unused": nn.Conv2d(3, 3, 1)})

    def forward(self, words: Tensor) -> Tensor:
        x = self.lstm(self.words(words))[0]
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0]) * self.gain
        x = self.skipped(torch.relu(x))
        return self.head(self.pair(x, x.flip(1)))


@pytest.fixture(scope="module")
def all_kinds() -> nn.Module:
    torch.manual_seed(0)
    return qat.prepare(AllKinds().eval(), qat.QuantRecipe(overrides={"skipped": SKIP}), torch.arange(9).reshape(3, 3))


def check_counts(model: nn.Module) -> None:
    text = qat.summary(model)
    quantizers = {name: m for name, m in model.named_modules() if isinstance(m, Quantizer)}
    layers = {name for name, m in model.named_modules() if isinstance(m, QuantLayer)}
    activations = {name for name, quantizer in quantizers.items() if quantizer.role == "activation"}
    learned = sum(parameter.numel() for quantizer in quantizers.values() for parameter in quantizer.parameters())
    floats = sum(parameter.numel() for parameter in model.parameters()) - learned
    assert re.search(rf"\n{len(layers)} quantized layers?, {len(activations)} activation quantizers?, \d", text)
    assert f"; {floats:,} float parameters, {learned:,} quantizer parameters" in text
    assert {name for name, row in rows(text).items() if row[1] != "float"} == layers | activations


def test_the_table_has_every_layer_and_its_reason(all_kinds: nn.Module) -> None:
    check_counts(all_kinds)
    table = rows(qat.summary(all_kinds))
    left = {name: row for name, row in table.items() if row[1] == "float"}
    assert set(left) == {"skipped", "norm", "gain", "unused", "deep.unused"}
    assert left["skipped"][-1] == "stays float: skipped by the recipe's pattern 'skipped'"
    assert left["norm"][-1] == "stays float: LayerNorm computes in float"
    assert left["gain"][-1].endswith("mul reads it as a plain tensor")
    assert all("forward never calls it" in left[name][-1] for name in ("unused", "deep.unused"))
    assert [table[name][0] for name in ("unused", "deep.unused", "skipped")] == ["Linear", "Conv2d", "Linear"]


def test_the_table_of_a_model_in_parts() -> None:
    model = qat.prepare(BranchesOnValues().eval(), None, draw(2, 3, 6, 6))
    check_counts(model)
    table = rows(qat.summary(model))
    assert qat.summary(model).splitlines()[-2:] == [
        f"the model is prepared in parts, since {REASON}",
        "parts that are one graph: body",
    ]
    assert {name for name, row in table.items() if row[1] == "float"} == {"unused"}
    assert table["unused"][0] == "Linear" and "forward never calls it" in table["unused"][-1]
    assert {"body.0", "body.3", "body.input_quantizer", "attend.out_proj", "lstm.product_hh_l0", "head"} <= set(table)
    assert ", 1 layer in float; " in qat.summary(model)  # `unused`


READS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda self, x: F.linear(x, self.c.weight, self.c.bias),
    lambda self, x: F.linear(x, self.c.weight[:2], self.c.bias[:2]),
]


@pytest.mark.parametrize("read", READS, ids=["whole", "in part"])
def test_overrides_of_a_layer_speak_for_the_functions_that_read_its_weight(read: Callable[..., Tensor]) -> None:
    net = Plain(lambda self, x: read(self, torch.relu(self.a(x))), **linears("a", "c"))
    model = qat.prepare(net, qat.QuantRecipe(overrides={"c": {"weight": {"bits": 4}}}), X)
    check_counts(model)
    assert sorted(weight_bits(model).values()) == [4, 8]
    model = qat.prepare(net, qat.QuantRecipe(overrides={"c": SKIP}), X)
    check_counts(model)
    assert weight_bits(model) == {"a": 8}
    assert "skipped by the recipe's pattern 'c'" in qat.summary(model)
