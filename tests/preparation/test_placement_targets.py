"""Where each target needs quantizers: on integer operands, shared grids where it wants them, none in float."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.ops import SqueezeExcitation

import qat
from qat.graph.guards import EXPECTATIONS
from qat.graph.nodes import tensor_nodes
from qat.quantizer import Quantizer
from qat.targets import PROFILES
from tests.references.prepared_case import Plain, assert_close_to_float, assert_computes_as, draw, input_grid

pytestmark = pytest.mark.filterwarnings("ignore::qat.export.litert.exporter.UnwritableWarning")
"""Grids are looked at, and no file is written."""

EACH = pytest.mark.parametrize("target", list(PROFILES))

CURVES = ("sigmoid", "tanh", "hardsigmoid", "hardswish", "silu", "gelu", "elu", "mish", "leaky_relu")
# Operation of the profiles: its computation on two tensors (a(x), c(x)), and whether it reads both.
OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    **{name: (getattr(torch, name), True) for name in ("add", "sub", "mul", "maximum", "minimum")},
    **{name: (lambda a, c, name=name: getattr(F, name)(a), False) for name in CURVES},
    "div": (lambda a, c: a / (c.abs() + 1), True),
    "cat": (lambda a, c: torch.cat([a, c], 1), True),
    "stack": (lambda a, c: torch.stack([a, c], 1).flatten(1, 2), True),
    "matmul": (lambda a, c: a.mT @ c, True),
    "avg_pool": (lambda a, c: F.avg_pool2d(a, (2, 1)), False),
    "max_pool": (lambda a, c: F.max_pool2d(a, (2, 1)), False),
    "mean": (lambda a, c: a.mean(1, keepdim=True), False),
    "interpolate": (lambda a, c: F.interpolate(a, scale_factor=(2, 1), mode="bilinear"), False),
    "softmax": (lambda a, c: a.softmax(-1), False),
    "log_softmax": (lambda a, c: F.log_softmax(a, -1), False),
    "layer_norm": (lambda a, c: F.layer_norm(a, (8,)), False),
    "group_norm": (lambda a, c: F.group_norm(a, 2), False),
    "instance_norm": (lambda a, c: F.instance_norm(a), False),
}
PRODUCTS_AND_SUMS = {"add", "mul", "cat", "stack", "matmul", "avg_pool"}
X = draw(3, 4, 8, 8)


def prepared(target: Any) -> fx.GraphModule:
    """For each operation two linear layers, itself on their results, and a linear layer that reads it."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        a, b, c = ([getattr(self, f"{name}_{part}") for name in OPERATIONS] for part in "abc")
        return [b[i](operate(a[i](x), c[i](x))) for i, (operate, _) in enumerate(OPERATIONS.values())]

    parts = {f"{name}_{part}": nn.Linear(8, 3 if part == "b" else 8) for name in OPERATIONS for part in "abc"}
    return qat.prepare(Plain(forward, **parts).eval(), qat.QuantRecipe(target=target), X)


def quantizer_behind(model: fx.GraphModule, name: str) -> Quantizer | None:
    """The quantizer that directly reads the result of a layer."""
    (node,) = [node for node in model.graph.nodes if node.op == "call_module" and node.target == name]
    found = [model.get_submodule(str(user.target)) for user in node.users if user.op == "call_module"]
    return next((module for module in found if isinstance(module, Quantizer)), None)


@EACH
def test_an_operation_gets_grids_as_its_target_computes_it(target: Any) -> None:
    profile, model = PROFILES[target], prepared(target)
    for operation, (_, both) in OPERATIONS.items():
        operands = [quantizer_behind(model, f"{operation}_{part}") for part in ("a", "c")[: 1 + both]]
        result = input_grid(model, f"{operation}_b")
        if operation in profile.float_operations - profile.split_operations:
            assert operands == [None] * len(operands), operation
        elif operation in PRODUCTS_AND_SUMS | profile.split_operations or profile.quantizes_outputs:
            wanted = operands[:1] if operation == "div" else operands
            assert all(isinstance(operand, Quantizer) for operand in wanted), operation
        if operation in profile.shared_grids:
            assert all(operand is result for operand in operands), f"{operation}: one grid for inputs and result"
        else:
            assert result not in operands, operation
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    assert all(quantizer.spec == getattr(profile, quantizer.role) for quantizer in quantizers)


def forward_of_everything(self: Any, x: Tensor) -> Tensor:
    """All that needs a decision: residual, cat, pools, squeeze-excitation, attention."""
    x = F.relu(self.a(x))
    x = F.relu(self.bn(self.b(x)) + x)
    x = torch.cat([x, F.max_pool2d(x, 3, 1, 1)], 1)
    x = F.silu(self.se(F.avg_pool2d(F.relu(self.c(x)), 2)))
    tokens = x.flatten(2).mT + self.place
    q, k, v = self.qkv(tokens).chunk(3, -1)
    return self.fc((torch.softmax(q @ k.mT / 2, -1) @ v).mean(1))


def everything(target: Any) -> tuple[nn.Module, fx.GraphModule]:
    net = Plain(
        forward_of_everything, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(4), c=nn.Conv2d(8, 4, 1), se=SqueezeExcitation(4, 2), qkv=nn.Linear(4, 12),
        fc=nn.Linear(4, 3), place=nn.Parameter(draw(16, 4)),
    ).eval()  # fmt: skip
    net.bn.running_mean.normal_()
    return net, qat.prepare(net, qat.QuantRecipe(target=target), draw(3, 3, 8, 8))


MOVES = {"flatten", "getattr", "chunk", "getitem", "max_pool2d"}
RELUS = {"relu", "activation"}


def name_of(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else node.target.__name__
    return target.rpartition(".")[2]


def is_quantizer(model: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), Quantizer)


def operands(model: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every operand of an operation, and the node that computed its values."""
    tensors = tensor_nodes(model.graph)
    for node in model.graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_quantizer(model, node) or name_of(node) in MOVES:
            continue
        grid = node.kwargs.get("input_quantizer")
        for operand in node.all_input_nodes:
            if operand is grid or operand is node.kwargs.get("norm"):
                continue
            if operand not in tensors and not is_quantizer(model, operand):
                continue
            while name_of(operand) in MOVES:
                operand = operand.all_input_nodes[0]
            yield node, operand


@EACH
def test_the_net_computes_as_the_float_one_and_every_grid_learns(target: Any) -> None:
    net, model = everything(target)
    x = draw(3, 3, 8, 8)
    assert_computes_as(net, model, x)
    assert_close_to_float(net, model, x, error=0.08)
    model.train()
    model(draw(3, 3, 8, 8, seed=1)).square().sum().backward()
    fixed = {f"{name}.scale": each for name, each in model.named_modules() if getattr(each, "is_fixed", False)}
    assert bool(fixed) == bool(PROFILES[target].fixed_grids)
    for name, parameter in model.named_parameters():
        if name not in fixed:
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize(("operation", "target_grid"), PROFILES["litert"].fixed_grids.items())
def test_a_fixed_grid_survives_data_and_switches(operation: str, target_grid: tuple[float, int]) -> None:
    function = {"softmax": lambda x: x.softmax(1)}.get(operation, getattr(F, operation, None))

    net = Plain(lambda self, x: self.last(function(self.first(x))), first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    model = qat.prepare(net, qat.QuantRecipe(target="litert"), torch.randn(2, 4))
    qat.calibrate(model, [torch.randn(8, 4)])
    qat.freeze_scales(model, False)
    (fixed,) = [each for each in model.modules() if isinstance(each, Quantizer) and each.is_fixed]
    assert tuple(float(each) for each in fixed.grid()) == target_grid and not fixed.scale.requires_grad


def test_integer_only_computes_with_integers_and_nothing_else() -> None:
    _, model = everything("integer_only")
    seen = 0
    for node, operand in operands(model):
        if node.target in EXPECTATIONS:
            continue
        if name_of(node) in RELUS:  # clipping belongs to its producer, which has no other consumer
            assert list(operand.users) == [node]
            continue
        assert is_quantizer(model, operand), (node, operand)
        seen += 1
    (output,) = [node for node in model.graph.nodes if node.op == "output"]
    assert is_quantizer(model, output.args[0]) and seen > 20


def dense(self: Any, x: Tensor) -> Tensor:
    """Every layer reads all results before it, as in DenseNet."""
    for layer in self.layers:
        x = torch.cat([x, F.relu(layer(x))], 1)
    return self.fc(x.mean((2, 3)))


DENSE_LAYERS = nn.ModuleList(nn.Conv2d(3 * (number + 1), 3, 3, padding=1) for number in range(3))
DENSE = Plain(dense, layers=DENSE_LAYERS, fc=nn.Linear(12, 4)).eval()


@EACH
def test_concatenations_in_a_row_are_on_one_grid(target: Any) -> None:
    net, x = DENSE, draw(4, 3, 6, 6)
    model = qat.prepare(net, qat.QuantRecipe(target=target), x)
    grids = {id(input_grid(model, f"layers.{number}")) for number in range(3)}
    assert len(grids) == (1 if "cat" in PROFILES[target].shared_grids else 3)
    assert_close_to_float(net, model, x, error=0.08)
    # One parameter: its gradient is the sum over all uses, and the state dict has it once.
    scales = [key for key in model.state_dict() if key.endswith(".scale") and "weight" not in key]
    assert len(scales) == sum(isinstance(m, Quantizer) and m.role == "activation" for m in model.modules())


def test_the_widest_reader_decides_about_a_shared_grid() -> None:
    recipe = qat.QuantRecipe(activation=qat.QuantSpec(bits=4, signed=True, symmetric=True),
                             overrides={"layers.1": {"activation": {"bits": 6}}}, target="tensorrt",
                             residual_bits=4)  # fmt: skip
    model = qat.prepare(DENSE, recipe, draw(4, 3, 6, 6))
    assert [input_grid(model, f"layers.{number}").spec.bits for number in range(3)] == [4, 6, 4]
    assert model.input_quantizer.spec.bits == 6
    assert "shared with" not in qat.summary(model)
