"""`integer_work`: its counts compared with formulas, and which products count as integer work."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from benchmarks.work import Place, Work, integer_work
from qat.layers import QuantLinear
from qat.layers.attention import QuantMultiheadAttention
from qat.layers.recurrent import QuantLSTM
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from tests.references.prepared_case import Plain

SEQUENCE = (5, 2, 8)
RECURRENT = 5 * 2 * (8 * 16 + 16 * 16)
ATTENTION = 10 * 8 * 32 + 2 * 2 * 5 * 5 * 8

COUNTS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]], int]] = {
    "conv": (lambda: nn.Conv2d(4, 6, (3, 5), stride=2), [(2, 4, 9, 9)], 2 * 6 * 4 * 3 * (3 * 5 * 4)),
    "linear of a vector": (lambda: nn.Linear(8, 3, bias=False), [(8,)], 8 * 3),
    "bilinear": (lambda: nn.Bilinear(8, 7, 3), [(5, 8), (5, 7)], 5 * 8 * 7 * 3),
    "lstm, two ways": (lambda: nn.LSTM(8, 16, bidirectional=True), [SEQUENCE], 2 * 4 * RECURRENT),
    "attention": (lambda: nn.MultiheadAttention(8, 2), [SEQUENCE] * 3, ATTENTION),
    "encoder layer, evaluated by one fused operator": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(2, 5, 8)], ATTENTION + 2 * 10 * 8 * 16,
    ),
    "no product": (lambda: nn.LayerNorm(3), [(3,)], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_counts_are_those_of_the_formula(case: str) -> None:
    build, shapes, macs = COUNTS[case]
    work = integer_work(build().eval(), tuple(torch.randn(shape) for shape in shapes))
    assert work.total == sum(place.macs for place in work.in_float) == macs
    assert work.share == (0.0 if macs else 1.0)


class Function(nn.Module):
    """A function as a module; `one` and `other` are quantizers that it may use."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.one = create_quantizer(QuantSpec(signed=True))
        self.other = create_quantizer(QuantSpec(signed=False, symmetric=False))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, x, y)


def overwritten(x: Tensor) -> Tensor:
    view = x[:, :, 1:]
    view.mul_(0.3)
    return x


INTEGER_OR_NOT: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "both": (lambda m, x, y: m.one(x) @ m.other(y), True),
    "one only": (lambda m, x, y: m.one(x) @ y, False),
    "made contiguous": (lambda m, x, y: m.one(x) @ m.other(y).transpose(-2, -1).contiguous(), True),
    "chunks": (lambda m, x, y: m.one(x).chunk(2, dim=-1)[1] @ m.other(y).split(2, dim=-2)[0], True),
    "max pooled": (lambda m, x, y: F.max_pool2d(m.one(x), 3, stride=1, padding=1) @ m.other(y), True),
    "padded with zero": (lambda m, x, y: F.pad(m.one(x), (0, 1)) @ F.pad(m.other(y), (0, 0, 1, 0)), True),
    "padded with one": (lambda m, x, y: F.pad(m.one(x), (0, 1), value=1.0) @ F.pad(m.other(y), (0, 0, 1, 0)), False),
    "scaled": (lambda m, x, y: (m.one(x) * 0.5) @ m.other(y), False),
    "a view of it scaled in place": (lambda m, x, y: overwritten(m.one(x)) @ m.other(y), False),
    "softmax, quantized": (lambda m, x, y: m.other(m.one(x).softmax(-1)) @ m.one(y), True),
    "einsum": (lambda m, x, y: torch.einsum("bhij,bhkj->bhik", m.one(x), m.other(y)), True),
    "fused attention": (lambda m, x, y: F.scaled_dot_product_attention(m.one(x), m.other(y), m.other(y)), False),
}


@pytest.mark.parametrize("case", INTEGER_OR_NOT)
def test_a_product_of_activations_is_integer_work_if_both_lie_on_grids(case: str) -> None:
    function, integer = INTEGER_OR_NOT[case]
    work = integer_work(Function(function), (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)))
    assert len(work.places) == 1 and work.total > 0
    assert work.share == float(integer)


def test_memory_reused_from_a_quantizer_makes_nothing_integer() -> None:
    def function(module: Function, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(20):
            module.one(x)  # freed at once: the next tensor reuses its memory
            total = total + ((x + 1) @ (y + 1)).sum()
        return total

    assert integer_work(Function(function), (torch.randn(64, 64), torch.randn(64, 64))).share == 0.0


def test_a_layer_needs_the_grid_of_its_input() -> None:
    def work(call: Callable[..., Tensor], own: QuantSpec | None = None) -> Work:
        layer, quantizer = QuantLinear(8, 4, activation_spec=own), create_quantizer(QuantSpec())
        return integer_work(Plain(call, layer=layer, quantizer=quantizer), torch.randn(2, 8))

    integer, other = (Work((Place("layer", "QuantLinear", 2 * 8 * 4, each),)) for each in (True, False))
    assert work(lambda m, x: m.layer(m.quantizer(x), input_quantizer=m.quantizer)) == integer
    assert work(lambda m, x: m.layer(x), QuantSpec()) == integer
    assert work(lambda m, x: m.layer(x)) == work(lambda m, x: m.layer(x, input_quantizer=m.quantizer)) == other
    assert work(lambda m, x: m.layer(m.quantizer(x) * 0.3, m.quantizer)) == other


def test_rules_without_integers_are_no_integer_work_and_layers_of_several_products_are() -> None:
    assert integer_work(QuantLinear(8, 4, weight_spec=QuantSpec(rule="apot", bits=4)), torch.randn(2, 8)).share == 0.0
    for layer, inputs, macs in (
        (QuantMultiheadAttention(8, 2), (torch.randn(SEQUENCE),) * 3, ATTENTION),
        (QuantLSTM(8, 16), (torch.randn(SEQUENCE),), 4 * RECURRENT),
    ):
        work = integer_work(layer, inputs)
        assert (work.total, work.share) == (macs, 1.0), work.in_float


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


class InParts(nn.Module):
    """A model whose parts are prepared one by one, with control flow and float work between them."""

    def __init__(self) -> None:
        super().__init__()
        recipe = qat.QuantRecipe(overrides={"head": {"skip": True}})
        self.backbone = qat.prepare(Small(), recipe, torch.randn(2, 3, 6, 6))
        head = qat.prepare(nn.Sequential(Small().head), example_inputs=torch.randn(2, 4, 4))
        self.heads = nn.ModuleList([head, nn.Linear(5, 2)])

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        maps = self.heads[0](F.pad(self.backbone(x=torch.stack(images)), (0, -1)))
        return [self.heads[1](image @ torch.eye(5)) for image in maps if image.dim()]


def test_places_have_their_names_and_the_model_is_left_as_it_was() -> None:
    model = InParts()

    def footprint() -> list[object]:
        return [
            (name, each.training, len(each._forward_hooks), sorted(vars(each))) for name, each in model.named_modules()
        ]

    before = footprint()
    work = integer_work(model, ([torch.randn(3, 6, 6), torch.randn(3, 6, 6)],))
    assert [(place.name, place.macs, place.integer) for place in work.places] == [
        ("backbone.conv", 2 * 4 * 16 * 27, True),
        ("backbone.matmul", 2 * 4 * 4 * 16, True),
        ("backbone.head", 2 * 4 * 4 * 5, False),
        ("heads.0.0", 2 * 4 * 4 * 5, True),
        ("", 2 * 4 * 5 * 5, False),
        ("heads.1", 2 * 4 * 5 * 2, False),
    ]
    assert footprint() == before and torch.backends.mha.get_fastpath_enabled()


def test_the_published_size_of_a_known_model() -> None:
    """torchvision's documentation says 1.81 GFLOPS (multiply-accumulates) for ResNet-18 at 224 x 224."""
    from torchvision.models import resnet18

    x = torch.randn(1, 3, 224, 224)
    work = integer_work(qat.prepare(resnet18(), example_inputs=x), x)
    assert math.isclose(work.total, 1.814e9, rel_tol=1e-3)
    assert work.share == 1.0 and len(work.places) == 21
