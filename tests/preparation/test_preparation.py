"""`prepare`: its result, options, dry runs, what stays float and why, what it refuses; what `summary` prints."""

import copy
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.ops import DeformConv2d

import qat
from qat.layers import QuantLayer
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.workflow import probe
from tests.references.prepared_case import Net, Plain, assert_takes_float_state, draw, input_grid, refused

IMAGES = torch.randn(2, 3, 8, 8)


def test_the_float_model_is_untouched_and_its_keys_stay() -> None:
    net = Net().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net, example_inputs=IMAGES)
    assert not any(isinstance(module, (Quantizer, QuantLayer)) for module in net.modules())
    qat.calibrate(model, [IMAGES])
    with torch.no_grad():
        model.stem.weight.add_(1)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert set(before) < set(model.state_dict())
    assert_takes_float_state(model, before)
    assert not model.training and model.block.bn1 is model.get_submodule("block.bn1")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "integer_only"])
def test_the_summary_names_what_computes_in_float_between_layers(target: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1))
    profile = qat.targets.profile_of(target)
    model = qat.prepare(nn.Sequential(net, nn.Sigmoid()), qat.QuantRecipe(target=target), IMAGES)
    said = [line for line in qat.summary(model).splitlines() if "between the layers" in line]
    named = {"onnxruntime": "2 hardswish", "tensorrt": "2 hardswish, 1 sigmoid"}.get(target)
    reason = profile.reasons["float_operations"].text
    assert said == ([f"{target} computes {named} between the layers in float: {reason}"] if named else [])


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "integer_only"])
def test_the_summary_names_convolutions_that_give_answers(target: str, tmp_path: Path) -> None:
    """Behind norm and activation too; one with a quantizer of the user's own behind it computes on integers."""
    ends = {"plain": nn.Conv2d(4, 4, 1), "normed": nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
            "own": nn.Sequential(nn.Conv2d(4, 4, 1), create_quantizer(qat.QuantSpec(), "activation"))}  # fmt: skip
    net = Plain(lambda self, x: [end(self.stem(x)) for end in self.ends.values()],
                stem=nn.Conv2d(3, 4, 1), ends=nn.ModuleDict(ends))  # fmt: skip
    model = qat.prepare(net, qat.QuantRecipe(target=target), IMAGES)
    said = [line for line in qat.summary(model).splitlines() if "that give answers" in line]
    assert [line.partition(":")[0] for line in said] == [
        "onnxruntime computes the convolutions that give answers in float (ends.plain, ends.normed.0)"
    ] * (target == "onnxruntime")
    if said:
        qat.calibrate(model, [IMAGES])
        qat.export_onnx(model.eval(), tmp_path / "model.onnx", IMAGES)
        assert qat.verify_onnx(tmp_path / "model.onnx", model, [IMAGES]).float_convolutions == 2


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: qat.prepare(Net(), IMAGES),
     "prepare: recipe must be a QuantRecipe, got Tensor; inputs are given by name, prepare(model,"
     " example_inputs=...)"),
    (lambda: qat.prepare(nn.Sequential(nn.ReLU()), example_inputs=IMAGES),
     "prepare: Sequential has no layer to quantize"),
    (lambda: qat.prepare(Net(), qat.QuantRecipe(overrides={"block.cnv1": {"skip": True}}), IMAGES),
     "prepare: the recipe's pattern 'block.cnv1' names no layer of the model; did you mean 'block.conv1' or"
     " 'block.conv2'?"),
    (lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(rule="lqs")), IMAGES),
     f"prepare: stem (weight): unknown quantizer 'lqs'; registered: {', '.join(registered_quantizers())};"
     " did you mean 'lsq'?"),
    (lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(granularity="group", group_size=2)), IMAGES),
     "prepare: stem (weight): group_size=2 does not divide the weight's 3 inputs; use 1, 3"),
])  # fmt: skip
def test_errors_are_sentences(make: Callable[[], Any], sentence: str) -> None:
    with refused(sentence, (ValueError, TypeError)):
        make()


def test_the_probe_names_quantizers_that_never_run() -> None:
    model = qat.prepare(Net(), example_inputs=IMAGES)
    model.add_submodule("orphan", create_quantizer(qat.QuantSpec()))
    with pytest.raises(ValueError, match=r"^prepare: these quantizers never run: orphan$"):
        probe(model, {"x": IMAGES}, set())


@pytest.mark.filterwarnings("ignore:a quantizer")
def test_summary_lists_every_layer_in_order() -> None:
    model = qat.prepare(Net(), example_inputs=IMAGES)
    lines = qat.summary(model).splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert names == [
        "input_quantizer", "stem", "stem_quantizer", "block.conv1", "block.conv1_quantizer", "block.conv2",
        "block.conv2_quantizer", "block.add_quantizer", "adaptive_avg_pool2d_quantizer", "fc",
    ]  # fmt: skip
    assert lines[1].endswith("not calibrated")
    assert lines[4].endswith("input: stem_quantizer, folds block.bn1")
    qat.calibrate(model, [IMAGES])
    assert "not calibrated" not in qat.summary(model)


def test_a_grid_without_negatives_refuses_negative_weights() -> None:
    with pytest.raises(ValueError, match=r"^prepare: stem \(weight\): values down to -\d\.\d+, which its grid"):
        qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(signed=False)), IMAGES)


def test_the_summary_names_each_norm_and_layers_without_a_twin() -> None:
    """Point 26: it named one norm of several, "floordiv reads it", and 0 layers in float."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        found: Tensor = self.n1(self.head(y)) + self.n2(self.head(self.deform(y, self.offset(y))))
        return found

    net = Plain(forward, a=nn.Conv2d(3, 4, 3), offset=nn.Conv2d(4, 18, 3, padding=1), head=nn.Conv2d(4, 2, 1),
                deform=DeformConv2d(4, 4, 3, padding=1), n1=nn.BatchNorm2d(2), n2=nn.BatchNorm2d(2))  # fmt: skip
    table = qat.summary(qat.prepare(net, example_inputs=torch.randn(2, 3, 8, 8)))
    assert "input: a_quantizer, folds n1; input: deform.deform_conv2d_quantizer, folds n2" in table
    assert "stays float: deform_conv2d reads its weight as a plain tensor" in table
    assert "1 layer in float" in table and "floordiv" not in table


def test_ranges_and_files_do_not_depend_on_torchs_contexts(tmp_path: Path) -> None:
    """Point 31: other ranges, a file of bfloat16 that no runtime reads, and training that ends in torch's words."""
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    found = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with context:
            prepared = qat.prepare(model, example_inputs=x)
            qat.calibrate(prepared, [x])
            qat.export_onnx(prepared, tmp_path / "model.onnx", x)
            assert qat.export.verify_onnx(tmp_path / "model.onnx", prepared, [x]).close
            answer = qat.convert(prepared)(x)
        assert prepared.training
        prepared(x).sum().backward()
        found.append((answer, (tmp_path / "model.onnx").read_bytes()))
    assert all(torch.equal(answer, found[0][0]) and file == found[0][1] for answer, file in found)


def test_an_optimizer_of_the_float_model_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Point 47: it trained nothing, and nothing said so."""
    net, x = Net(), torch.randn(2, 3, 8, 8)
    for model_of, said in ((lambda model: net, 1), (lambda model: model, 0)):
        model = qat.prepare(net, example_inputs=x)
        qat.calibrate(model, [x])
        optimizer = torch.optim.SGD(model_of(model).parameters(), lr=0.1)
        with caplog.at_level(logging.WARNING, "qat"):
            for _ in range(2):
                model.train()
                model(x).sum().backward()
                optimizer.step()
                model.eval()(x)
                model.train().eval()(x)  # point 84: a second evaluation gives no gradients, whatever lies there
        assert sum("made before qat.prepare" in each for each in caplog.messages) == 2 * said
        caplog.clear()


def branching(self: Any, x: Tensor) -> Tensor:
    y = self.body(x).flatten(2).permute(2, 0, 1)
    if y.sum() > 1e9:
        y = -y
    return self.head(self.lstm(self.attend(y, y, y)[0])[0])


def branches_on_values() -> nn.Module:
    """Only its parts can be traced."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    parts = {"attend": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(4, 3), "head": nn.Linear(3, 2)}
    return Plain(branching, body=body, **parts, unused=nn.Linear(2, 2))


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
    "in the order in which they run": (lambda self, x: self.a(torch.relu(self.b(torch.relu(self.c(x))))),
                                       linears("a", "b", "c"), {}, ["c"], ["a"]),
    "skipped layers do not count": (lambda self, x: self.a(self.b(self.c(self.d(x)))), linears("a", "b", "c", "d"),
                                    {"d": SKIP, "type:Linear": {}, "a": SKIP}, ["c"], ["b"]),
    "weights that functions read": (
        lambda self, x: F.linear(self.b(F.linear(x, self.c.weight, self.c.bias)), self.a.weight[:2]),
        linears("a", "b", "c"), {}, ["c"], ["linear"],
    ),
    "a layer that is called first and last is the first": (lambda self, x: self.a(self.b(self.a(x))), linears("a", "b"),
                                                           {}, ["a"], []),
    "products of attention": (lambda self, x: self.attend(x, x, x, need_weights=False)[0],
                              {"attend": nn.MultiheadAttention(4, 2, batch_first=True)}, {},
                              ["attend.query_projection"], ["attend.out_proj"]),
    "products of an LSTM": (lambda self, x: self.a(self.b(self.lstm(x)[0])),
                            {"lstm": nn.LSTM(4, 4), **linears("a", "b")}, {},
                            ["lstm.product_ih_l0", "lstm.product_hh_l0"], ["a"]),
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


REASON = (
    "Plain cannot be captured: the way through it depends on the values of a tensor (test_preparation.py, line"
    f" {branching.__code__.co_firstlineno + 2}); torch.where(condition, a, b) takes both ways"
)


@pytest.mark.parametrize("name", ["first_bits", "last_bits"])
def test_a_model_in_parts_has_no_first_layer(name: str) -> None:
    with refused(f"prepare: {name}=4 needs a model with one graph, and {REASON}; use overrides"):
        qat.prepare(branches_on_values(), qat.QuantRecipe(**{name: 4}), draw(2, 3, 6, 6))


WHOLE: dict[str, tuple[Callable[[], nn.Module], Tensor, qat.QuantRecipe]] = {
    "other bits": (Net, draw(2, 3, 8, 8), qat.QuantRecipe(overrides={"block": SKIP}, first_bits=4)),
    "in parts": (branches_on_values, draw(2, 3, 6, 6), qat.QuantRecipe()),
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


def all_kinds(self: Any, words: Tensor) -> Tensor:
    """Layers of every kind, quantized or not, and parameters that functions read."""
    x = self.lstm(self.words(words))[0]
    x = self.norm(x + self.attend(x, x, x, need_weights=False)[0]) * self.gain
    x = self.skipped(torch.relu(x))
    return self.head(self.pair(x, x.flip(1)))


def test_the_table_has_every_layer_and_its_reason() -> None:
    parts = {"words": nn.Embedding(9, 8), "lstm": nn.LSTM(8, 8, batch_first=True), "norm": nn.LayerNorm(8)}
    parts |= {"attend": nn.MultiheadAttention(8, 2, batch_first=True), "gain": nn.Parameter(torch.ones(8))}
    parts |= {"skipped": nn.Linear(8, 8), "pair": nn.Bilinear(8, 8, 4), "head": nn.Linear(4, 2)}
    parts |= {"unused": nn.Linear(3, 3), "deep": nn.ModuleDict({"unused": nn.Conv2d(3, 3, 1)})}
    recipe = qat.QuantRecipe(overrides={"skipped": SKIP})
    model = qat.prepare(Plain(all_kinds, **parts).eval(), recipe, torch.arange(9).reshape(3, 3))
    check_counts(model)
    table = rows(qat.summary(model))
    left = {name: row for name, row in table.items() if row[1] == "float"}
    assert set(left) == {"skipped", "norm", "gain", "pair", "unused", "deep.unused"}
    assert left["pair"][-1] == "stays float: Bilinear has no quantized twin"
    assert left["skipped"][-1] == "stays float: skipped by the recipe's pattern 'skipped'"
    assert left["norm"][-1] == "stays float: LayerNorm computes in float"
    assert left["gain"][-1].endswith("mul reads it as a plain tensor")
    assert all("forward never calls it" in left[name][-1] for name in ("unused", "deep.unused"))
    assert [table[name][0] for name in ("unused", "deep.unused", "skipped")] == ["Linear", "Conv2d", "Linear"]


def test_the_table_of_a_model_in_parts() -> None:
    model = qat.prepare(branches_on_values().eval(), None, draw(2, 3, 6, 6))
    check_counts(model)
    table = rows(qat.summary(model))
    assert qat.summary(model).splitlines()[-3:-1] == [
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
def test_overrides_of_a_layer_speak_for_what_reads_its_weight(read: Callable[..., Tensor]) -> None:
    net = Plain(lambda self, x: read(self, torch.relu(self.a(x))), **linears("a", "c"))
    overrides: tuple[dict[str, Any], ...] = ({"weight": {"bits": 4}}, SKIP)
    narrow, skipped = (qat.prepare(net, qat.QuantRecipe(overrides={"c": change}), X) for change in overrides)
    check_counts(narrow)
    check_counts(skipped)
    assert sorted(weight_bits(narrow).values()) == [4, 8] and weight_bits(skipped) == {"a": 8}
    assert "skipped by the recipe's pattern 'c'" in qat.summary(skipped)
