"""Export of whole models: weights read by functions, attention, constants, several inputs and outputs, grids, parts."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torchvision.ops import SqueezeExcitation

import qat
from qat.export import compare_layers, optimized_operators, verify_onnx
from qat.export.onnxruntime.verification import LayerComparison
from qat.preparation.parts import prepared_parts
from qat.quantizer import Quantizer
from tests.export.test_export_layers import assert_exports, assert_same, exported, part_of, quantized
from tests.references.prepared_case import Net, Plain, draw, refused

FLOAT_PRODUCTS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits", "Einsum"}


def linears(*sizes: int) -> dict[str, nn.Module]:
    """Linear layers a, b, c ... with these numbers of features between them."""
    return {name: nn.Linear(*pair) for name, pair in zip("abcdef", itertools.pairwise(sizes), strict=False)}


def attend(self: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.a(x).chunk(3, -1))
    return self.b(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def windows(self: Any, x: Tensor) -> Tensor:
    """Pads the image to a multiple of the window size, splits it into windows and joins them again."""
    rest = [(-size) % 3 for size in x.shape[-2:]]
    x = F.pad(self.stem(x), (0, rest[1], 0, rest[0]))
    n, c, h, w = x.shape
    x = x.view(n, c, h // 3, 3, w // 3, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, c)
    return self.b(F.relu(self.a(x))).reshape(n, -1, 5).mean(1)


WORDS = torch.arange(20).reshape(4, 5) % 9
# Forward, parts, and input.
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], Tensor]] = {
    "reads with another bias, and of a part": (
        lambda self, x: F.linear(F.relu(F.linear(x, self.a.weight, self.bias)), self.b.weight[:3], self.b.bias[:3]),
        {**linears(6, 5, 4), "bias": nn.Parameter(draw(5))}, draw(4, 6),
    ),
    "a convolution that reads parameters": (
        lambda self, x: F.conv2d(F.relu(self.conv(x)), self.weight, self.bias, padding=1, groups=2),
        {"conv": nn.Conv2d(3, 4, 3), "weight": nn.Parameter(draw(4, 2, 3, 3)), "bias": nn.Parameter(draw(4))},
        draw(4, 3, 6, 6),
    ),
    "an embedding that is the last layer too": (
        lambda self, x: F.linear(F.relu(self.a(self.embed(x))), self.embed.weight),
        {"embed": nn.Embedding(9, 8), **linears(8, 8)}, WORDS,
    ),
    "causal attention": (attend, linears(8, 24) | {"b": nn.Linear(8, 3)}, draw(4, 5, 8)),
    "parameters as operands of products": (
        lambda self, x: self.b(self.left @ torch.relu(self.a(x) @ self.right)) + torch.einsum("bij,jk->bik", x, self.k),
        {**linears(8, 8), "b": nn.Linear(6, 6), "left": nn.Parameter(draw(5, 5)), "right": nn.Parameter(draw(8, 6)),
         "k": nn.Parameter(draw(8, 6, seed=1))}, draw(4, 5, 8),
    ),
    "outputs in a dictionary, a list and a tuple": (
        lambda self, x: {"out": self.b(y := torch.relu(self.a(x))), "others": [self.c(y), (y,)]},
        {"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "c": nn.Linear(8, 3)}, draw(4, 8),
    ),
    "one layer, two grids": (lambda self, x: self.a(torch.relu(self.a(x) * 3)), linears(8, 8), draw(4, 8)),
    "look-ups of words, and of the words behind them": (
        lambda self, x: self.a(self.words(x) + self.next(x.roll(-1, 1))).mean(1),
        {"words": nn.Embedding(9, 8), "next": nn.Embedding(9, 8), **linears(8, 4)}, WORDS,
    ),
    # Left alone, the exporter looks the rows up itself and stores floats, since the indices are constants.
    "a learned position embedding": (
        lambda self, x: self.a(self.words(x) + self.places(torch.arange(x.size(1)))).mean(1),
        {"words": nn.Embedding(9, 8), "places": nn.Embedding(5, 8), **linears(8, 4)}, WORDS,
    ),
    "windows, padded": (windows, {"stem": nn.Conv2d(3, 4, 3, padding=1), **linears(4, 8, 5)}, draw(4, 3, 7, 9)),
    "squeeze and excitation": (lambda self, x: self.b(self.se(F.hardswish(self.a(x)))).mean((2, 3)),
                               {"a": nn.Conv2d(3, 4, 3), "se": SqueezeExcitation(4, 2), "b": nn.Conv2d(4, 4, 1)},
                               draw(4, 3, 6, 6)),
}  # fmt: skip
FLOATS = {"causal attention": frozenset({(5, 5)})}
"""Shapes of float values with more than one axis in the file."""


@pytest.mark.parametrize("case", MODELS)
def test_models_of_one_input(case: str, tmp_path: Path) -> None:
    forward, parts, x = MODELS[case]
    assert_exports(tmp_path / "model.onnx", Plain(forward, **parts), {"x": x}, floats=FLOATS.get(case, frozenset()))


def test_several_inputs_as_a_tuple_and_as_a_mapping_in_any_order(tmp_path: Path) -> None:
    net = Plain(lambda self, x, y: self.b(torch.cat([self.a(x), y], 1)), a=nn.Linear(8, 4), b=nn.Linear(9, 4))
    inputs = {"x": draw(4, 8), "y": draw(4, 5, seed=1)}
    model, path = quantized(net, inputs), tmp_path / "model.onnx"
    reverse = dict(reversed(inputs.items()))
    for given in (tuple(inputs.values()), inputs, reverse):
        qat.export_onnx(model, path, given)
        assert [declared.name for declared in onnx.load(path).graph.input] == ["x", "y"]
        for batch in (inputs, reverse, (tuple(inputs.values()), torch.zeros(4))):
            assert qat.verify_onnx(path, model, [batch]).max_difference < 2e-6
        assert [layer for layer in compare_layers(path, model, given) if layer.differing] == []


def test_the_file_holds_only_what_evaluation_computes(tmp_path: Path) -> None:
    """An auxiliary head is computed in training alone."""

    def forward(self: Any, x: Tensor) -> Any:
        y = torch.relu(self.body(x))
        return (self.head(y), self.aux(y)) if self.training else self.head(y)

    x, path = draw(4, 8), tmp_path / "model.onnx"
    net = Plain(forward, body=nn.Linear(8, 8), head=nn.Linear(8, 4), aux=nn.Linear(8, 3))
    model = qat.prepare(net.train(), example_inputs=x)
    qat.calibrate(model, [x])
    qat.export_onnx(model.train(), path, x)
    graph = onnx.load(path).graph
    assert len(graph.output) == 1
    assert sorted(tuple(array.dims) for array in graph.initializer if len(array.dims) > 1) == [(4, 8), (8, 8)]
    assert_same(path, model, x)
    assert model.training


# Operations that keep a grid. Where ONNX Runtime does not propagate it, it computes the next operation in float, or
# quantizes the tensor a second time in a way of its own (MatMulNBits).
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: torch.roll(x, 1, 1),
    "roll of two axes": lambda x: x.roll((1, 2), (1, 2)),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "slice": lambda x: x[:, 1::2],
    "a list of places": lambda x: x[:, torch.tensor([3, 0, 2])],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "transpose": lambda x: x.transpose(0, 1),
    "channel shuffle": lambda x: torch.channel_shuffle(x, 5),
    "windows": lambda x: x[:, :4].reshape(-1, 2, 2, 8).permute(0, 2, 1, 3).reshape(-1, 4, 8),
}

if TorchVersion(torch.__version__) >= (2, 12):  # the exporter of torch 2.11 does not know it
    MOVES["adaptive max pooling"] = lambda x: F.adaptive_max_pool2d(x.mT.unsqueeze(-1), 1).flatten(1)


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_moves_keep_the_products_behind_them_in_integers(target: Any, tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        x = F.gelu(self.first(x))
        return {name: self.layers[number](move(x)) for number, (name, move) in enumerate(MOVES.items())}

    net = Plain(forward, first=nn.Linear(8, 8), layers=nn.ModuleList(nn.Linear(8, 6) for _ in MOVES))
    x, path = draw(16, 5, 8), tmp_path / "model.onnx"
    model = exported(path, net, {"x": x}, qat.QuantRecipe(target=target))
    assert len([name for name, part in model.named_modules() if isinstance(part, Quantizer)]) == 3 + len(MOVES)
    operators = optimized_operators(path)
    of_first = {"Gemm"} if target == "tensorrt" else set()  # a Gemm with a bias in float, as that target reads it
    assert FLOAT_PRODUCTS & set(operators) == of_first, operators
    assert qat.verify_onnx(path, model, [x, x[:3]]).max_difference < 2e-6


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_calls_that_the_exporter_merges_are_followed(shared: bool, tmp_path: Path) -> None:
    """The second call of `a` equals the first. With one quantizer for all, the third must not be mistaken for it."""
    net = Plain(lambda self, x: self.c(torch.cat([self.a(x), self.a(x), self.b(x)], -1)), a=nn.Linear(6, 6),
                b=nn.Linear(6, 6), c=nn.Linear(18, 3))  # fmt: skip
    model, x, path = quantized(net, {"x": draw(4, 6)}), draw(4, 6), tmp_path / "model.onnx"
    if shared:
        for node in model.graph.nodes:
            if node.target in ("a_quantizer_1", "b_quantizer"):
                node.target = "a_quantizer"
        model.recompile()
    qat.export_onnx(model, path, x)
    names = [node.name for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"]
    third = "a_quantizer.2" if shared else "b_quantizer"
    assert names == ["input_quantizer", "a_quantizer", third, "cat_quantizer"]
    layers = compare_layers(path, model, x)
    assert len(layers) == 5 and [layer for layer in layers if layer.differing] == []
    other = quantized(Plain(lambda self, x: self.e(self.d(x)), d=nn.Linear(6, 6), e=nn.Linear(6, 3)), {"x": x})
    with pytest.raises(ValueError, match=r"model\.onnx has no quantizer 'd_quantizer'; was it made from this model"):
        compare_layers(path, other, x)


@pytest.mark.parametrize("target", ["qnnpack", "integer_only"])
def test_grids_that_are_shared(target: Any, tmp_path: Path) -> None:
    """Concatenation of a convolution and a max pool of another: one grid for all three on these targets.

    An average of 9 integers never lies between two levels, one of 4 often does.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = torch.cat([F.max_pool2d(x, 3, 1, 1), F.relu(3 * self.b(x))], 1)
        return F.avg_pool2d(self.c(x), 3, 1).flatten(1)

    net = Plain(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3, padding=1), c=nn.Conv2d(8, 4, 1))
    assert_exports(tmp_path / "model.onnx", net, {"x": draw(4, 3, 8, 8)}, qat.QuantRecipe(target=target))


def branches(self: Any, x: Tensor) -> Tensor:
    """A forward that depends on values, so that only parts can be traced."""
    y = self.body(x)
    if y.sum() > 1e9:
        y = -y
    return self.heads[0](y) + self.heads[1](x)  # type: ignore[no-any-return]


def test_a_model_in_parts_is_exported_part_by_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = draw(4, 3, 8, 8)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    heads = nn.ModuleList([nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), Net()])
    model = quantized(Plain(branches, body=body, heads=heads), {"x": x})
    line = branches.__code__.co_firstlineno + 3
    with refused(
        "export_onnx: Plain was prepared in parts, since Plain cannot be captured: the way through it depends on"
        f" the values of a tensor (test_export_models.py, line {line}); torch.where(condition, a, b) takes both ways;"
        " export each part (body, heads.0, heads.1), see qat.preparation.parts.prepared_parts(model), or take the"
        " reason away as docs/timm_and_huggingface.md does"
    ):
        qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert not list(tmp_path.iterdir())
    parts = prepared_parts(model)
    assert list(parts) == ["body", "heads.0", "heads.1"]
    with torch.no_grad():
        seen = {"body": x, "heads.0": parts["body"](x), "heads.1": x}
    with pytest.raises(ValueError, match=r"Sequential\.forward.* does not run with the example_inputs float32"):
        qat.export_onnx(parts["heads.0"], tmp_path / "head.onnx", x)
    for name, part in parts.items():
        path = tmp_path / f"{name}.onnx"
        qat.export_onnx(part, path, seen[name])
        for samples in (4, 7):
            assert_same(path, part, part_of(seen, samples)[name])


def test_a_quantizer_that_would_vanish_is_named(tmp_path: Path) -> None:
    """Of two quantized layers written by the user, one of which this input never reaches."""
    layers = {"used": qat.QuantLinear(8, 8), "other": qat.QuantLinear(4, 8)}
    model = Plain(lambda self, x: self.used(x) if x.shape[1] == 8 else self.other(x), **layers).eval()
    qat.calibrate(model, [draw(4, 8), draw(4, 4)])
    with refused("export_onnx: 1 of the model's 2 quantizers are not in the ONNX graph: other.input_quantizer"):
        qat.export_onnx(model, tmp_path / "model.onnx", draw(4, 8))
    assert not list(tmp_path.iterdir())


def test_a_batch_that_the_model_counts_is_fixed_with_a_warning(tmp_path: Path) -> None:
    net = Plain(lambda self, x: self.b(torch.stack([self.a(row) for row in x.unbind(0)])), **linears(8, 8, 3))
    x, path = draw(4, 8), tmp_path / "model.onnx"
    with pytest.warns(UserWarning) as caught:
        model = exported(path, net, {"x": x})
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == [
        "export_onnx: the batch is fixed at that of example_inputs, for the model was prepared with x.shape[0] == 4"
    ]
    assert qat.verify_onnx(path, model, [x]).max_difference < 2e-6
    with pytest.raises(ValueError):
        qat.verify_onnx(path, model, [draw(6, 8)])


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A file with two outputs, one value and three classes, and its model."""
    net = Plain(lambda self, x: (self.c(y := torch.relu(self.a(x))), self.b(y).flatten(0)), a=nn.Linear(8, 8),
                b=nn.Linear(8, 1), c=nn.Linear(8, 3))  # fmt: skip
    path = tmp_path_factory.mktemp("two_heads") / "model.onnx"
    return path, exported(path, net, {"x": draw(16, 8)})


def test_verification_of_several_outputs(two_heads: tuple[Path, nn.Module]) -> None:
    path, model = two_heads
    x = draw(16, 8)
    with torch.no_grad():
        labels = model(x)[0].argmax(1)
    labels[:4] = (labels[:4] + 1) % 3
    found = qat.verify_onnx(path, model, [(x[:10], labels[:10]), [x[10:], labels[10:]]])
    assert (found.samples, found.agreement, found.torch_top1, found.onnx_top1) == (16, 1.0, 75.0, 75.0)
    # Without labels, or with labels in some batches only.
    assert qat.verify_onnx(path, model, [x, (x,), (x, None)]).torch_top1 is None
    assert qat.verify_onnx(path, model, [x[4:], (x[:4], labels[:4])]).onnx_top1 == 0.0
    # A difference in the second output alone is found.
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("b").bias.add_(1.0)
    assert qat.verify_onnx(path, other, [x]).max_difference == pytest.approx(1.0, abs=0.01)


def test_verification_refuses_what_does_not_fit(two_heads: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, model = two_heads
    x = draw(4, 8)
    with refused("verify_onnx: the file's outputs have other shapes than the model's; was it made from it?"):
        qat.verify_onnx(path, quantized(nn.Sequential(nn.Linear(8, 4)), {"input": x}), [x])
    with refused("verify_onnx: batches is empty; at least one batch is needed to compare anything"):
        qat.verify_onnx(path, model, [])
    net = Plain(lambda self, x, y: self.a(x) + self.b(y), a=nn.Linear(8, 3), b=nn.Linear(8, 3))
    two = quantized(net, {"x": x, "y": x})
    with pytest.raises(ValueError, match=r"the file has 1 input.*2 tensors were given"):
        qat.verify_onnx(path, two, [((x, x), None)])
    with pytest.raises(FileNotFoundError):
        qat.verify_onnx(tmp_path / "x.onnx", model, [x])
    (tmp_path / "x.onnx").write_text("not a model")
    with pytest.raises(ValueError, match="ONNX"):
        qat.verify_onnx(tmp_path / "x.onnx", model, [x])
    with pytest.raises(ValueError, match="was it made from this model"):
        compare_layers(path, quantized(Net(), {"x": draw(4, 3, 8, 8)}), draw(4, 3, 8, 8))


def test_a_branch_that_ends_in_writing_is_not_exported(tmp_path: Path) -> None:
    """Nothing reads the tensors that are written into, but what writes there."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.b(F.silu(self.a(x), inplace=True))
        y.masked_fill_(y > 0.5, 0.25)
        return self.c(x)  # type: ignore[no-any-return]

    x, path = draw(4, 6), tmp_path / "model.onnx"
    model = exported(path, Plain(forward, **linears(6, 6, 6), c=nn.Linear(6, 3)), {"x": x})
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-5


def test_products_behind_a_grid_that_exact_sessions_cannot_move(tmp_path: Path) -> None:
    """With a fixed batch it reshapes rows of rows for a Gemm, where it would round the inputs to 8 bits once more."""
    signed = qat.QuantSpec(signed=True, symmetric=True)
    x, path = draw(4, 7, 6), tmp_path / "model.onnx"
    net = Plain(lambda self, x: self.c(torch.relu(self.b(F.leaky_relu(x + self.a(x), 0.1)))).view(4, 7, 3),
                a=nn.Linear(6, 6), b=qat.QuantLinear(6, 3, activation_spec=signed), c=nn.Linear(3, 3))  # fmt: skip
    with pytest.warns(UserWarning, match="fixed at 4"):
        model = exported(path, net, {"x": x})
    assert_same(path, model, x)


def scored(rows: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(rows @ rows.transpose(-2, -1) + bias, -1)


def masked(rows: Tensor, bias: Tensor) -> Tensor:
    """torch's attention asks for the type of the mask: a guard on what is stored."""
    return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=bias).transpose(-2, -1)


@pytest.mark.parametrize("attention", [scored, masked])
def test_what_is_computed_of_constants_is_stored(attention: Callable[..., Tensor], tmp_path: Path) -> None:
    """Scores plus what a small network computes of a constant table, as Swin's continuous position bias."""
    bias = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    net = Plain(lambda self, x: self.head(attention(self.project(x), self.bias(self.table).squeeze(-1))),
                project=nn.Linear(6, 8), head=nn.Linear(5, 3), bias=bias, table=nn.Buffer(draw(5, 5, 2)))  # fmt: skip
    x, path = draw(4, 5, 6), tmp_path / "model.onnx"
    model = exported(path, net, {"x": x})
    differences, outputs = LayerComparison(path, model).follow(x)
    assert differences and sum(layer.differing for layer in differences) == 0
    torch.testing.assert_close(*outputs[0])
    stored = {tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert (64, 2) not in stored and (5, 5) in stored


@pytest.mark.parametrize("repeats", [True, False])
def test_a_parameter_expanded_as_a_query_keeps_its_quantizer(repeats: bool, tmp_path: Path) -> None:
    """Point 16: the quantizer behind the expansion has to be in the file; SigLIP pools with one query for all."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x, count = self.embed(x), x.shape[0]
        probe = self.probe.repeat(count, 1, 1) if repeats else self.probe.expand(count, -1, -1)
        return self.fc(self.attention(probe, x, x, need_weights=False)[0][:, 0])

    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    parts = {"embed": nn.Linear(8, 16), "attention": attention, "fc": nn.Linear(16, 3)}
    x, path = torch.randn(4, 5, 8), tmp_path / "model.onnx"
    model = qat.prepare(Plain(forward, probe=nn.Parameter(draw(1, 1, 16)), **parts), example_inputs=x[:2])
    qat.calibrate(model.eval(), [x])
    for images in (x[:1], x):
        qat.export_onnx(model, path, images)
        assert qat.verify_onnx(path, model, [x]).close == 1.0


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda s: s.topk(300, dim=1).indices,
    "the smallest": lambda s: s.topk(300, 1, False, False)[1],
    "sort": lambda s: s.sort(1).indices[:, :300],
    "descending": lambda s: torch.sort(s, dim=1, descending=True)[1][:, :300],
    "stable": lambda s: s.sort(stable=True, dim=1, descending=True)[1][:, :300],
    "argsort": lambda s: s.argsort(1)[:, -300:],
    "argmax": lambda s: s.argmax(1, keepdim=True),
    "max": lambda s: s.max(1, keepdim=True).indices,
    "windows": lambda s: F.max_pool1d(s[:, None], 4, return_indices=True)[1][:, 0],
}


@pytest.mark.parametrize("case", CHOICES)
def test_of_equal_integers_the_lowest_index_is_chosen(case: str, tmp_path: Path) -> None:
    """Point 93: nine tenths of these scores are equal, and a runtime took others than torch."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.relu(self.a(x))
        scores = self.b(features).squeeze(-1)
        return scores, features.gather(1, CHOICES[case](scores).unsqueeze(-1).expand(-1, -1, 8))

    x = draw(3, 2000, 8)
    model = quantized(Plain(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 1)), x)
    few = torch.where(torch.arange(2000)[:, None] % 20 == 0, x, 0.002 * x)
    scores = model(few)[0]
    assert scores.unique().numel() < 0.1 * scores.numel()
    qat.export_onnx(model, tmp_path / "x.onnx", x)
    found = verify_onnx(tmp_path / "x.onnx", model, [few])
    assert found.agreement == 1 and found.max_difference < 1e-6
    torch.testing.assert_close(qat.convert(model)(few), model(few), rtol=0, atol=0)
