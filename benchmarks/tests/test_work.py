"""`integer_work`: its counts compared with formulas, and which products count as integer work."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

import qat
from benchmarks.work import Place, Work, integer_work
from benchmarks.work_operators import macs_of
from qat.layers import QuantConv2d, QuantFunction, QuantLinear
from qat.layers.attention import QuantMultiheadAttention
from qat.layers.bilinear import QuantBilinear
from qat.layers.embedding import QuantEmbedding
from qat.layers.recurrent import QuantLSTM
from qat.quantizer import Quantizer, create_quantizer
from qat.spec import QuantSpec
from tests.references.prepared_case import Plain, draw

SEQUENCE = (5, 2, 8)
RECURRENT = 5 * 2 * (8 * 16 + 16 * 16)

COUNTS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]], int]] = {
    "conv": (lambda: nn.Conv2d(4, 6, (3, 5), stride=2), [(2, 4, 9, 9)], 2 * 6 * 4 * 3 * (3 * 5 * 4)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), [(1, 4, 6, 6)], 8 * 9 * 16),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), [(2, 4, 9)], 2 * 6 * 7 * 4 * 3),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), [(1, 2, 4, 5, 6)], 3 * (2 * 3 * 4) * 2 * 27),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), [(1, 3, 8, 8)], 64 * 3 * 4 * 9),
    "linear": (lambda: nn.Linear(8, 3), [(2, 5, 8)], 10 * 8 * 3),
    "linear of a vector": (lambda: nn.Linear(8, 3, bias=False), [(8,)], 8 * 3),
    "bilinear": (lambda: nn.Bilinear(8, 7, 3), [(5, 8), (5, 7)], 5 * 8 * 7 * 3),
    "rnn": (lambda: nn.RNN(8, 16), [SEQUENCE], RECURRENT),
    "gru": (lambda: nn.GRU(8, 16), [SEQUENCE], 3 * RECURRENT),
    "lstm": (lambda: nn.LSTM(8, 16), [SEQUENCE], 4 * RECURRENT),
    "lstm, two ways, two layers": (
        lambda: nn.LSTM(8, 16, num_layers=2, bidirectional=True), [SEQUENCE],
        2 * 4 * RECURRENT + 2 * 4 * 10 * (32 * 16 + 16 * 16),
    ),
    "lstm, projected": (
        lambda: nn.LSTM(8, 16, proj_size=4), [SEQUENCE], 4 * 10 * (8 * 16 + 4 * 16) + 10 * 16 * 4
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2), [SEQUENCE] * 3, 10 * 8 * 32 + 2 * 2 * 5 * 5 * 8),
    "encoder layer, evaluated by one fused operator": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(2, 5, 8)],
        10 * 8 * 32 + 2 * 2 * 5 * 5 * 8 + 2 * 10 * 8 * 16,
    ),
    "deformable": (lambda: DeformConv2d(4, 6, 3, groups=2), [(1, 4, 8, 8), (1, 18, 6, 6)], 6 * 36 * 2 * 9),
    "no product": (lambda: nn.LayerNorm(3), [(3,)], 0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("case", COUNTS)
def test_counts_are_those_of_the_formula(case: str) -> None:
    build, shapes, macs = COUNTS[case]
    work = integer_work(build().eval(), tuple(torch.randn(shape) for shape in shapes))
    assert work.total == macs
    assert work.share == (0.0 if macs else 1.0)
    assert sum(place.macs for place in work.in_float) == macs


def test_cudnn_recurrent_layers_count_as_on_the_cpu() -> None:
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
    x = torch.randn(SEQUENCE)
    macs = macs_of(torch.ops.aten._cudnn_rnn, (x, list(layer.parameters()), 4, None), {}, ())
    assert macs == integer_work(layer, x).total == 2 * 4 * RECURRENT + 2 * 4 * 10 * (32 * 16 + 16 * 16)


class Function(nn.Module):
    """A function as a module; `one` and `other` are quantizers that it may use."""

    def __init__(self, function: Callable[..., Tensor], spec: QuantSpec | None = None) -> None:
        super().__init__()
        self.function = function
        self.one = create_quantizer(spec or QuantSpec(signed=True))
        self.other = create_quantizer(QuantSpec(signed=False, symmetric=False))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, x, y)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=1, padding=1)


def overwritten(x: Tensor) -> Tensor:
    view = x[:, :, 1:]
    view.mul_(0.3)
    return x


INTEGER_OR_NOT: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "both": (lambda m, x, y: m.one(x) @ m.other(y), True),
    "one only": (lambda m, x, y: m.one(x) @ y, False),
    "the other only": (lambda m, x, y: x @ m.other(y), False),
    "neither": (lambda m, x, y: x @ y, False),
    "transposed": (lambda m, x, y: m.one(x) @ m.other(y).transpose(-2, -1), True),
    "made contiguous": (lambda m, x, y: m.one(x) @ m.other(y).transpose(-2, -1).contiguous(), True),
    "heads split off": (lambda m, x, y: m.one(x).reshape(2, 3, 4, 2, 2).permute(0, 1, 3, 2, 4) @ m.other(y)[..., :2, :]
                        .unsqueeze(2), True),
    "rolled": (lambda m, x, y: torch.roll(m.one(x), 1, dims=2) @ m.other(y), True),
    "chunks": (lambda m, x, y: m.one(x).chunk(2, dim=-1)[1] @ m.other(y).split(2, dim=-2)[0], True),
    "max pooled": (lambda m, x, y: pooled(m.one(x)) @ m.other(y), True),
    "dropped out": (lambda m, x, y: F.dropout(m.one(x), 0.5, m.training) @ m.other(y), True),
    "padded with zero": (lambda m, x, y: F.pad(m.one(x), (0, 1)) @ F.pad(m.other(y), (0, 0, 1, 0)), True),
    "padded with one": (lambda m, x, y: F.pad(m.one(x), (0, 1), value=1.0) @ F.pad(m.other(y), (0, 0, 1, 0)), False),
    "scaled": (lambda m, x, y: (m.one(x) * 0.5) @ m.other(y), False),
    "scaled in place": (lambda m, x, y: m.one(x).mul_(0.5) @ m.other(y), False),
    "a view of it scaled in place": (lambda m, x, y: overwritten(m.one(x)) @ m.other(y), False),
    "added": (lambda m, x, y: (m.one(x) + m.other(y)) @ m.other(y), False),
    "softmax": (lambda m, x, y: m.one(x).softmax(-1) @ m.other(y), False),
    "softmax, quantized": (lambda m, x, y: m.other(m.one(x).softmax(-1)) @ m.one(y), True),
    "averaged": (lambda m, x, y: F.avg_pool2d(m.one(x), 3, 1, 1) @ m.other(y), False),
    "bmm": (lambda m, x, y: torch.bmm(m.one(x)[0], m.other(y)[0]), True),
    "einsum": (lambda m, x, y: torch.einsum("bhij,bhkj->bhik", m.one(x), m.other(y)), True),
    "einsum of one": (lambda m, x, y: torch.einsum("bhij,bhkj->bhik", m.one(x), y), False),
    "added to": (lambda m, x, y: torch.baddbmm(x[0], m.one(x)[0], m.other(y)[0]), True),
    "added to, one only": (lambda m, x, y: torch.baddbmm(m.other(y)[0], m.one(x)[0], y[0]), False),
    "convolution between activations": (lambda m, x, y: F.conv2d(m.one(x), m.other(y)[:, :, :2, :2]), True),
    "fused attention": (lambda m, x, y: F.scaled_dot_product_attention(m.one(x), m.other(y), m.other(y)), False),
}  # fmt: skip


@pytest.mark.parametrize("case", INTEGER_OR_NOT)
def test_a_product_of_activations_is_integer_work_if_both_lie_on_grids(case: str) -> None:
    function, integer = INTEGER_OR_NOT[case]
    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    work = integer_work(Function(function), (x, y))
    assert len(work.places) == 1 and work.total > 0
    assert work.share == float(integer)


def test_fused_attention_counts_both_products() -> None:
    queries, keys = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    module = Function(lambda m, x, y: F.scaled_dot_product_attention(x, y, y))
    assert integer_work(module, (queries, keys)).total == 2 * (2 * 3) * 5 * 7 * 4


def test_memory_reused_from_a_quantizer_makes_nothing_integer() -> None:
    def function(module: Function, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(20):
            module.one(x)  # freed at once: the next tensor reuses its memory
            total = total + ((x + 1) @ (y + 1)).sum()
        return total

    assert integer_work(Function(function), (torch.randn(64, 64), torch.randn(64, 64))).share == 0.0


@pytest.mark.parametrize(
    "spec", [QuantSpec(rule="apot", bits=4), QuantSpec(granularity="group", group_size=2)], ids=["no grid", "groups"]
)
def test_rules_without_integers_are_no_integer_work(spec: QuantSpec) -> None:
    layer = QuantLinear(8, 4, weight_spec=spec)
    has_integers = layer.weight_quantizer.has_integers
    assert not has_integers
    assert integer_work(layer, torch.randn(2, 8)).share == 0.0


@pytest.mark.parametrize(
    ("own", "call", "integer"),
    [
        (None, lambda m, x: m.layer(x), False),
        (None, lambda m, x: m.layer(m.quantizer(x), input_quantizer=m.quantizer), True),
        (None, lambda m, x: m.layer(m.quantizer(x), m.quantizer), True),
        (None, lambda m, x: m.layer(m.quantizer(x), None), False),
        (None, lambda m, x: m.layer(m.quantizer(x).flip(1), input_quantizer=m.quantizer), True),
        (None, lambda m, x: m.layer(x, input_quantizer=m.quantizer), False),
        (None, lambda m, x: m.layer(m.quantizer(x) * 0.3, m.quantizer), False),
        (None, lambda m, x: m.layer(input_quantizer=m.quantizer, x=m.quantizer(x)), True),
        (QuantSpec(), lambda m, x: m.layer(x), True),
    ],
)
def test_a_layer_needs_the_grid_of_its_input(own: QuantSpec | None, call: Callable[..., Tensor], integer: bool) -> None:
    layer = QuantLinear(8, 4, activation_spec=own)
    work = integer_work(Plain(call, layer=layer, quantizer=create_quantizer(QuantSpec())), torch.randn(2, 8))
    assert work == Work((Place("layer", "QuantLinear", 2 * 8 * 4, integer),))


COMPOSITE: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int]] = {
    "attention": (lambda: QuantMultiheadAttention(8, 2), (torch.randn(SEQUENCE),) * 3, 10 * 8 * 32 + 2 * 2 * 5 * 5 * 8),
    "lstm": (lambda: QuantLSTM(8, 16), (torch.randn(SEQUENCE),), 4 * RECURRENT),
    "bilinear": (lambda: QuantBilinear(8, 7, 3), (torch.randn(5, 8), torch.randn(5, 7)), 5 * 8 * 7 * 3),
    "bilinear without grids": (
        lambda: QuantBilinear(8, 7, 3, activation_spec=None), (torch.randn(5, 8), torch.randn(5, 7)), 5 * 8 * 7 * 3,
    ),
    "embedding": (lambda: QuantEmbedding(9, 4), (torch.tensor([1, 2]),), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPOSITE)
def test_layers_of_several_products(case: str) -> None:
    build, inputs, macs = COMPOSITE[case]
    work = integer_work(build(), inputs)
    assert macs <= work.total <= 1.15 * macs  # a bilinear form may be computed in two steps
    assert work.share == (0.0 if "without" in case else 1.0), work.in_float


def test_inference_mode_changes_nothing() -> None:
    x = torch.randn(2, 3, 6, 6)
    model = qat.prepare(Small(), example_inputs=x)
    with torch.inference_mode():
        inside = integer_work(model, x)
    assert inside == integer_work(model, x) and inside.share == 1.0


def test_gradients_of_the_inputs_are_left_alone() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    y = x * 2
    integer_work(QuantLinear(8, 4), y)
    y.sum().backward()
    assert x.grad is not None and bool((x.grad == 2).all())


def test_a_function_that_reads_a_weight_is_a_place_of_its_own() -> None:
    model = Plain(
        lambda m, x: m.product(x, m.weight) + F.linear(x, m.weight),
        weight=nn.Parameter(draw(6, 8)), product=QuantFunction(F.linear, (6, 8), activation_spec=QuantSpec()),
    )  # fmt: skip
    places = integer_work(model, torch.randn(2, 8)).places
    assert places == (Place("product", "QuantFunction", 96, True), Place("", "Plain", 96, False))


class Small(nn.Module):
    """Convolution, a product of activations, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).flatten(2)
        return self.head(torch.matmul(y, y.transpose(1, 2)))


def test_a_prepared_model_place_by_place() -> None:
    x = torch.randn(2, 3, 6, 6)
    recipe = qat.QuantRecipe(overrides={"head": {"skip": True}})
    work = integer_work(qat.prepare(Small(), recipe, x), x)
    head = Place("head", "Linear", 2 * 4 * 4 * 5, False)
    conv, product = Place("conv", "QuantConv2d", 2 * 4 * 16 * 27, True), Place("matmul", "matmul", 2 * 4 * 4 * 16, True)
    assert work.places == (conv, product, head) and work.in_float == (head,)
    assert work.total == conv.macs + product.macs + head.macs
    assert work.share == 1 - head.macs / work.total


def test_training_and_evaluation_count_the_same() -> None:
    x = torch.randn(2, 3, 6, 6)
    model = qat.prepare(Small(), example_inputs=x)
    before = integer_work(model, x)
    qat.calibrate(model, [x])
    assert integer_work(model.train(), x) == integer_work(model.eval(), x) == before


class InParts(nn.Module):
    """A model whose parts are prepared one by one, with control flow and float work between them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = qat.prepare(Small(), example_inputs=torch.randn(2, 3, 6, 6))
        head = qat.prepare(nn.Sequential(Small().head), example_inputs=torch.randn(2, 4, 4))
        self.heads = nn.ModuleList([head, nn.Linear(5, 2)])

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        maps = self.heads[0](F.pad(self.backbone(x=torch.stack(images)), (0, -1)))
        return [self.heads[1](image @ torch.eye(5)) for image in maps if image.dim()]


def test_parts_of_a_model_keep_their_names() -> None:
    places = integer_work(InParts(), ([torch.randn(3, 6, 6), torch.randn(3, 6, 6)],)).places
    assert [(place.name, place.macs, place.integer) for place in places] == [
        ("backbone.conv", 2 * 4 * 16 * 27, True),
        ("backbone.matmul", 2 * 4 * 4 * 16, True),
        ("backbone.head", 2 * 4 * 4 * 5, True),
        ("heads.0.0", 2 * 4 * 4 * 5, True),
        ("", 2 * 4 * 5 * 5, False),
        ("heads.1", 2 * 4 * 5 * 2, False),
    ]


def footprint(model: nn.Module) -> list[object]:
    """Everything that measuring might change in a model."""
    return [
        (
            name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(module.__dict__),
            len(module._forward_hooks_always_called), len(module._forward_pre_hooks_with_kwargs),
        )
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("inputs", [torch.randn(2, 3, 6, 6), torch.randn(2, 7, 6, 6)], ids=["runs", "fails"])
def test_the_model_is_left_as_it_was(inputs: Tensor) -> None:
    model = InParts()
    model.backbone.head.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = footprint(model)
    with nullcontext() if inputs.shape[1] == 3 else pytest.raises(ValueError, match="prepared for inputs with"):
        integer_work(model, (list(inputs),))
    assert footprint(model) == before
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case", ["both", "one only", "made contiguous", "scaled in place"])
def test_products_are_counted_on_the_meta_device(case: str) -> None:
    function, integer = INTEGER_OR_NOT[case]
    x = torch.randn(2, 3, 4, 4, device="meta")
    work = integer_work(Function(function).to("meta"), (x, x))
    assert work.total == 6 * 64 and work.share == float(integer)


def test_an_uncalibrated_model_is_counted_without_a_warning_of_ours_and_with_others() -> None:
    class Warns(QuantConv2d):
        def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            warnings.warn("a word of its own", stacklevel=1)
            return super().operate(x, weight, bias)

    layer = Warns(3, 4, 3)
    assert any(isinstance(module, Quantizer) and not module.is_calibrated for module in layer.modules())
    with pytest.warns(UserWarning, match="^a word of its own$") as caught:
        work = integer_work(layer, torch.randn(1, 3, 5, 5))
    assert len(caught) == 1 and work.total == 4 * 9 * 27


def test_the_published_size_of_a_known_model() -> None:
    """torchvision's documentation says 1.81 GFLOPS (multiply-accumulates) for ResNet-18 at 224 x 224."""
    from torchvision.models import resnet18

    x = torch.randn(1, 3, 224, 224)
    work = integer_work(qat.prepare(resnet18(), example_inputs=x), x)
    assert math.isclose(work.total, 1.814e9, rel_tol=1e-3)
    assert work.share == 1.0 and len(work.places) == 21
