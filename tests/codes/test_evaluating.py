"""Evaluation as an integer program: the values of plain evaluation to the bit, and only while the model is the same."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation, StochasticDepth

import qat
from qat.analysis.statistics import statistics_collected
from qat.codes.evaluation import modules, products
from qat.codes.evaluation.arithmetic import CodeGrid
from qat.codes.evaluation.products import EXACT, Product, geometry_of
from qat.codes.evaluation.program import integer_program
from qat.codes.operators.geometry import Geometry
from qat.integers.evaluation import evaluation_copy
from qat.kernels import plain_formulas
from qat.kernels.cpu.compiler import library
from qat.layers import IntegerWeight
from tests.references.prepared_case import Plain

pytestmark = pytest.mark.skipif(library() is None, reason="evaluation runs plainly without the C kernels")


def residual(groups: int = 1) -> nn.Module:
    layers = {"conv": nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False), "norm": nn.BatchNorm2d(8)}
    return Plain(lambda self, x: self.act(self.norm(self.conv(x)) + x), **layers, act=nn.ReLU(inplace=True))


def branches(self: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    y = torch.cat([a, torch.sigmoid(self.conv(b))], dim=1)
    return y.view(x.size(0), 2, 4, 4, 4).transpose(1, 2).contiguous().view(x.size(0), 8, 4, 4)


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), *layers, nn.Flatten(), nn.LazyLinear(5))


CASES: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: images(nn.ReLU(), residual(), residual(groups=8), nn.AdaptiveAvgPool2d(1)),
    "groups": lambda: images(nn.ReLU6(), residual(groups=2)),
    "curves": lambda: images(nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.GELU()),
    "pools": lambda: images(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1), nn.AvgPool2d(2)),
    "branches": lambda: images(nn.ReLU(), Plain(branches, conv=nn.Conv2d(4, 4, 1))),
    "squeeze": lambda: images(nn.ReLU(), SqueezeExcitation(8, 4), nn.Conv2d(8, 8, 1)),
    "depth": lambda: images(nn.ReLU(), nn.Conv2d(8, 8, 1), StochasticDepth(0.5, "row"), nn.Dropout(inplace=True)),
    "rows": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(81, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
    "words": lambda: images(nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 4, (1, 2), padding="valid")),
    "wide": lambda: nn.Sequential(nn.Conv2d(3, 1, 1), nn.Conv2d(1, 16, 3, padding=3), nn.Conv2d(16, 4, 3, 2, 3)),
    "one axis": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)),
}

GRIDS = {
    "8 bits": {},
    "signed": {"activation": qat.QuantSpec(signed=True, symmetric=True)},
    "few": {"activation": qat.QuantSpec(bits=3), "weight": qat.QuantSpec(bits=4, granularity="tensor")},
}


@pytest.fixture(params=["as it is", "no-vnni"])
def either_processor(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as it is":
        monkeypatch.setenv("QAT_PROCESSOR", request.param)
    monkeypatch.setattr(products, "FEW", 0)  # these models are small enough for float


@functools.cache
def calibrated(case: str, grids: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 9, 9)
    float_model = CASES[case]()
    float_model(x)  # sizes of lazy layers, statistics
    return of_float(float_model.eval(), x, **GRIDS[grids]), x


def of_float(net: nn.Module, x: Any, **recipe: Any) -> Any:
    model = qat.prepare(net, qat.QuantRecipe(**recipe), example_inputs=x)
    qat.calibrate(model, [x])
    return model.eval()


def prepared(case: str = "residual", grids: str = "8 bits") -> tuple[Any, Tensor]:
    return copy.deepcopy(calibrated(case, grids))


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), plain_formulas():
        y: Tensor = model(x)
    return y


def program_of(model: Any) -> Any:
    return model._engine_state.evaluator.program


STEPS = {
    "curves": ("Quantize Product Product Product Product", [True, True, False]),
    "branches": ("Quantize Product Product Table Table Product", [False, False]),
    "depth": ("Quantize Product Product Product", [True, False]),
    "squeeze": (
        "Quantize Product AsGiven Dequantize AdaptiveAvgPool2d Quantize Product Product Join Product Product",
        [False, True, False, False],
    ),
}
"""What a program calls, and whether the products before the last hand floats on."""


@pytest.mark.parametrize("case", STEPS)
def test_a_program_stays_on_codes_from_end_to_end(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_PROCESSOR", "no-vnni")
    model, x = prepared(case)
    with torch.no_grad():
        model(x)
    called = [program_of(model).get_submodule(str(n.target)) for n in program_of(model).graph.nodes if "module" in n.op]
    steps, floats = STEPS[case]
    assert [type(each).__name__ for each in called if not isinstance(each, nn.Flatten)] == steps.split()
    between = [each for each in called if isinstance(each, Product)][:-1]
    tables = [each.table is not None and each.table.is_floating_point() for each in between]
    assert [a.kind is torch.float32 or b for a, b in zip(between, tables, strict=True)] == floats


def test_an_argument_that_is_left_out() -> None:
    def forward(self: Any, unused: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        return self.last(torch.relu(self.conv(x)).mean((2, 3)))  # type: ignore[no-any-return]

    x = {"x": torch.randn(4, 3, 9, 9)}
    model = of_float(Plain(forward, conv=nn.Conv2d(3, 8, 3), last=nn.Linear(8, 2)).eval(), x)
    with torch.no_grad():
        with plain_formulas():
            expected = model(**x)
        assert torch.equal(model(**x), expected)
        assert program_of(model) is not None
        with pytest.raises(
            ValueError, match=r"^the model was prepared with its argument 'x', which this call leaves out"
        ):
            model()


@pytest.mark.filterwarnings("ignore::qat.export.litert.exporter.UnwritableWarning")
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.GroupNorm(4, 16)], ids=["average", "norm"])
def test_averages_on_ties_are_those_of_the_model(pool: nn.Module) -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    float_model = nn.Sequential(*convolutions, pool, nn.Conv2d(16, 16, 1), nn.Flatten(), nn.LazyLinear(5)).eval()
    x = torch.randn(100, 3, 8, 8)
    float_model(x[:2])
    model = of_float(float_model, x[:64], target="litert")
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        expected = plainly(model, given)
        with torch.no_grad():
            assert torch.equal(model(given), expected)
            assert torch.equal(qat.convert(model, "reference")(given), expected)


def test_a_model_that_evaluates_plainly_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = prepared()
    model[0].register_forward_hook(lambda *_: None)
    with torch.no_grad(), caplog.at_level(logging.INFO, "qat"):
        model(x)
        model(x)
    assert [message for message in caplog.messages if "operation by operation" in message] == [
        "evaluation runs operation by operation: '0' has a hook, or a method of it was replaced"
    ]


def test_where_qat_looks_inside_it_says_nothing_and_looks_at_the_first_batch_alone(caplog):
    model, x = prepared()
    state = model._engine_state
    with torch.no_grad(), caplog.at_level(logging.INFO, "qat"):
        with statistics_collected(model) as found:
            model(x)
            assert state.evaluator.program is None
            model(x)
            assert state.evaluator.program is not None
        qat.reestimate_batch_norm(model, [x])
    assert found and not [each.message for each in caplog.records if "operation by operation" in each.message]


class DropPath(nn.Module):
    """Not what its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_class_that_is_named_as_a_dropout_is_not_taken_for_one() -> None:
    x = torch.randn(4, 3, 9, 9)
    model = of_float(nn.Sequential(nn.Conv2d(3, 8, 3), DropPath(), nn.Conv2d(8, 8, 1)).eval(), x)
    expected = plainly(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert torch.equal(qat.convert(model)(x), expected)


@pytest.mark.usefixtures("either_processor")
@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_plain_evaluation(case: str, grids: str) -> None:
    model, x = prepared(case, grids)
    for batch in (x, x[:1], x.contiguous(memory_format=torch.channels_last), 100 * torch.randn(2, 3, 9, 9)):
        expected = plainly(model, batch)
        with torch.inference_mode():
            found = model(batch)
        assert torch.equal(found, expected)
    assert program_of(model) is not None
    floats = [node for node in program_of(model).graph.nodes if str(node.target).rpartition(".")[2] == "relu"]
    assert not floats


def retrained(model: Any) -> None:
    """Writes through data, which no version counts."""
    for parameter in model.train().parameters():
        parameter.data.mul_(1.5)
    model.eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model[0].weight.mul_(2),
    "data": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "data in place": lambda model: model[0].weight.data.mul_(2),
    "state dict": lambda model: model.load_state_dict({**model.state_dict(), "0.weight": model[0].weight * 2}),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight * 2)),
    "switch": lambda model: qat.disable_fake_quant(model),
    "padding": lambda model: setattr(model[0], "padding", (1, 1)),
    "hook": lambda model: model[0].register_forward_hook(lambda module, args, y: y + 1),
    "statistics": lambda model: model[1].running_mean.add_(1),
    "data behind training": retrained,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_answers_as_it_is_now(change: str) -> None:
    model, x = prepared()
    with torch.no_grad():
        before = model(x)
        assert program_of(model) is not None
        CHANGES[change](model)
        after = model(x)
    assert not torch.equal(before, after) and torch.equal(after, plainly(model, x))


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_var", "2.conv.weight_quantizer.scale"])
def test_nan_in_a_parameter_is_seen_behind_a_program_that_agreed(name: str) -> None:
    model, x = prepared()
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        model(x)
        found.get(name, model[1].bias).view(-1)[0] = torch.nan
        expected = plainly(model, x)
        assert torch.equal(model(x).isnan(), expected.isnan()) and expected.isnan().any()


def failing(*given: object) -> Tensor:
    raise RuntimeError("no memory\nfor this")


ADD = modules.arithmetic.add
BROKEN = [
    (lambda *given: ADD(*given).clamp(min=1), "computed something else"),
    (failing, "fails (no memory)"),
    (lambda *given: ()[1], "fails (tuple index out of range)"),
    (lambda **none: None, "fails (<lambda>() takes 0 positional arguments but 6 were given)"),
]


@pytest.mark.parametrize(("add", "said"), BROKEN)
def test_a_program_that_computes_something_else_does_not_run(add, said, monkeypatch, caplog):
    model, x = prepared()
    monkeypatch.setattr(modules.arithmetic, "add", add)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "qat"):
        with pytest.raises(ValueError, match="the model was prepared for inputs with"):
            model(x[:, :2])  # the model's own words, after which nothing is decided
        for _ in range(2):
            assert torch.equal(model(x), plainly(model, x))
    assert program_of(model) is None
    assert caplog.messages == [f"evaluation runs operation by operation: its integer program {said}"]
    assert f"its last evaluation ran operation by operation: its integer program {said}\n" in str(qat.explain(model))


FORGOTTEN = {
    "ceil_mode": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "padding": lambda x: F.max_pool2d(x, 3, padding=1),
    "dilation": lambda x: F.max_pool2d(x, 2, dilation=2),
    "average": lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
    "divisor": lambda x: F.avg_pool2d(x, 3, divisor_override=5),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_list_that_is_left_out_before_others_is_none(case: str) -> None:
    """torch.export writes it as an empty list, which functions of torch do not take for a window's stride."""
    net = Plain(lambda self, x: self.b(FORGOTTEN[case](self.a(x))), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1))
    x = torch.randn(2, 3, 9, 9)
    model = of_float(net.eval(), x)
    with torch.no_grad():
        assert torch.equal(model(x), plainly(model, x)) and model.evaluates_on_codes
    model.train()(x).sum().backward()
    assert "trains on codes, the fast way" in str(qat.explain(model))


def test_a_product_that_onednn_sums_up_wrongly_runs_in_float(monkeypatch, caplog):
    """The self-check's single sample may be multiplied in float: each product proves its own kernel."""
    sums = products.onednn.PackedWeight.sums
    monkeypatch.setattr(products.onednn.PackedWeight, "sums", lambda packed, codes: sums(packed, codes) + 1)
    program = integer_program(cast("torch.fx.GraphModule", evaluation_copy(prepared()[0])))
    assert program is not None
    made = next(each for each in program.modules() if isinstance(each, Product))
    codes = torch.randint(0, 256, (4, 3, 65, 65), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, "qat"):
        assert torch.equal(made._fastest()(codes), made._in_float()(codes))
    if made.multiplies_integers():
        assert caplog.messages == ["oneDNN sums up a product of (8, 3, 3, 3) wrongly; it runs in float"]


def test_raw_pixels_are_refused_behind_a_float_batch_too_and_with_gradients_the_model_itself_runs() -> None:
    model, x = prepared()
    with torch.no_grad():
        model(x)
        with pytest.raises(TypeError, match=r"^input_quantizer: x must be a floating-point tensor, got torch.uint8$"):
            model((255 * x).to(torch.uint8))
    model(x).sum().backward()
    assert model[0].weight.grad is not None


PARTED = {  # of the weight, and the groups
    "two parts": ((3, 1024, 1, 1), 1),
    "five parts": ((3, 4096, 1, 1), 1),
    "groups": ((4, 1024, 1, 1), 2),
    "more parts than channels": ((3, 2, 60, 60), 1),
    "rows": ((3, 4096), 1),
}


@pytest.mark.parametrize("large", [1.0, 0.3])
@pytest.mark.parametrize("case", PARTED)
def test_sums_in_parts_round_once(case: str, large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first of the channels hold nearly all of a sum."""
    monkeypatch.setattr(Geometry, "is_exact", lambda *unused: False)
    shape, groups = PARTED[case]
    weight = torch.randint(90, 128, shape).float()
    weight[:, int(large * shape[1]) + 1 :] = 0
    one, outputs = torch.ones(shape[0]), shape[0]
    layer: Any = qat.QuantLinear(shape[1], outputs)
    codes, options = torch.randint(200, 256, (50, shape[1]), dtype=torch.uint8), {}
    if len(shape) == 4:
        layer, options = qat.QuantConv2d(groups * shape[1], outputs, shape[2], groups=groups), {"groups": groups}
        size = (2, groups * shape[1], *(each + 20 for each in shape[2:]))
        codes = torch.randint(200, 256, size, dtype=torch.uint8)
    geometry = geometry_of(layer)
    assert geometry is not None
    integers = IntegerWeight(weight, one, torch.zeros(outputs), one)
    product = Product(layer, geometry, integers, CodeGrid(1.0, 0.0, 0.0, 255.0))
    multiply: Any = nn.functional.conv2d if options else nn.functional.linear
    sums = multiply(codes.double(), weight.double(), **options)
    assert large < 1 or (sums.max() > EXACT and (sums % 2).any())  # so that rounding has something to do
    assert torch.equal(product(codes), sums.float())
