"""prepare: where quantizers go, what is fused, what stays float and why, and what the copy keeps."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import qat
from qat.layers import QuantLayer
from qat.preparation.prepared import probe
from qat.preparation.report import LEFT_IN_FLOAT
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers


class Block(nn.Module):
    """A residual block that reuses one ReLU, as torchvision's do."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.block = Block()
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.pool(F.relu(self.stem(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def activation_quantizers(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, Quantizer) and m.role == "activation"]


def calls(model: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in model.graph.nodes if node.op == "call_module"]


def test_one_quantizer_a_tensor_placed_at_the_end_of_its_producer() -> None:
    model = qat.prepare(Net(), example_inputs=torch.randn(1, 3, 8, 8))
    assert sorted(activation_quantizers(model)) == sorted(
        [
            "input_quantizer",
            "stem_quantizer",
            "block.conv1_quantizer",
            "block.conv2_quantizer",
            "block.add_quantizer",
            "adaptive_avg_pool2d_quantizer",
        ]
    )
    # Each runs once; the max pool and the flatten carry the grid on; the logits stay as they are.
    assert calls(model) == [
        "input_quantizer", "stem", "stem_quantizer", "pool", "block.conv1", "block.relu", "block.conv1_quantizer",
        "block.conv2", "block.conv2_quantizer", "block.relu", "block.add_quantizer", "adaptive_avg_pool2d_quantizer",
        "fc",
    ]  # fmt: skip
    grids = {n.target: n.kwargs["grid"].target for n in model.graph.nodes if "grid" in n.kwargs}
    assert grids == {
        "stem": "input_quantizer",
        "block.conv1": "stem_quantizer",
        "block.conv2": "block.conv1_quantizer",
        "fc": "adaptive_avg_pool2d_quantizer",
    }


def test_the_float_model_is_untouched_and_its_keys_stay() -> None:
    net = Net().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net)
    assert not any(isinstance(module, (Quantizer, QuantLayer)) for module in net.modules())
    qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
    with torch.no_grad():
        model.stem.weight.add_(1)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert set(before) < set(model.state_dict())
    result = model.load_state_dict(before, strict=False)
    assert result.unexpected_keys == [] and all("quantizer" in key for key in result.missing_keys)
    assert not model.training and model.block.bn1 is model.get_submodule("block.bn1")


def test_a_prepared_model_deep_copies_pickles_and_loads_strictly() -> None:
    torch.manual_seed(0)
    model = qat.prepare(Net().eval())
    x = torch.randn(2, 3, 8, 8)
    qat.calibrate(model, [x])
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        assert set(twin.state_dict()) == set(model.state_dict())
    fresh = qat.prepare(Net().eval())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), expected)


def test_training_normalises_with_batch_statistics_and_updates_them() -> None:
    torch.manual_seed(0)
    net = Net().train()
    x = torch.randn(8, 3, 8, 8) + 1
    for _ in range(50):
        net(x)  # calibration runs in evaluation, on these statistics
    model = qat.prepare(net)
    qat.calibrate(model, [x])
    before = model.block.bn1.running_mean.clone()
    model(2 * x).square().sum().backward()
    assert not torch.equal(model.block.bn1.running_mean, before)
    assert int(model.block.bn1.num_batches_tracked) == 51
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    torch.testing.assert_close(model(x), net(x), rtol=0.2, atol=0.1)


def test_evaluation_changes_no_state() -> None:
    model = qat.prepare(Net().eval())
    qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
    before = copy.deepcopy(model.state_dict())
    model(100 * torch.randn(4, 3, 8, 8))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_resnet18_is_quantized_throughout() -> None:
    model = qat.prepare(torchvision.models.resnet18(num_classes=10), example_inputs=torch.randn(1, 3, 32, 32))
    assert model.meta[LEFT_IN_FLOAT] == {}
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 21
    assert len(activation_quantizers(model)) == 30
    handed = [node for node in model.graph.nodes if "norm" in node.kwargs]
    assert len(handed) == 20


def test_mobilenet_v3_large_prepares_calibrates_and_trains() -> None:
    torch.manual_seed(0)
    model = qat.prepare(torchvision.models.mobilenet_v3_large(num_classes=4), example_inputs=torch.randn(2, 3, 64, 64))
    assert model.meta[LEFT_IN_FLOAT] == {}
    qat.calibrate(model, [torch.randn(4, 3, 64, 64)])
    model.train()
    model(torch.randn(4, 3, 64, 64)).square().sum().backward()
    scales = [p for n, p in model.named_parameters() if n.endswith("scale")]
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in scales)


class OddOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.up = nn.ConvTranspose2d(3, 4, 2)
        self.read = nn.Linear(4, 2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.up(self.first(x))))
        return F.linear(x.mean((2, 3)), self.read.weight)


def test_what_stays_float_says_why() -> None:
    recipe = qat.QuantRecipe(overrides={"fir*": {"skip": True}})

    class WithConv(OddOnes):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.last(x))

    model = qat.prepare(WithConv(), recipe, example_inputs=torch.randn(1, 3, 4, 4))
    assert model.meta[LEFT_IN_FLOAT] == {
        "first": "skipped by the recipe's pattern 'fir*'",
        "up": "ConvTranspose2d has no quantized twin",
        "read": "forward never calls it: unused in this mode, or its weight is read by a function",
        "norm": "no quantized convolution directly before it",
    }
    table = qat.summary(model)
    assert "stays float: skipped by the recipe's pattern 'fir*'" in table
    assert "1 quantized layer, 2 activation quantizers, 4 layers in float;" in table


def test_layers_shared_between_calls_get_the_grid_of_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.conv(x) * 3)

    torch.manual_seed(0)
    net = Twice().eval()
    model = qat.prepare(net)
    x = torch.randn(4, 2, 3, 3)
    qat.calibrate(model, [x])
    grids = [node.kwargs["grid"].target for node in model.graph.nodes if node.target == "conv"]
    assert grids == ["input_quantizer", "mul_quantizer"]
    torch.testing.assert_close(model(x), net(x), rtol=0.1, atol=0.1)


def test_overrides_choose_the_grid_of_a_layers_input() -> None:
    eight = {"weight": {"bits": 8}, "activation": {"bits": 8}}
    recipe = qat.QuantRecipe(
        weight=qat.QuantSpec(bits=4, granularity="channel", narrow_range=True),
        activation=qat.QuantSpec(bits=4, signed=False, symmetric=False),
        overrides={"stem": eight, "fc": eight},
    )
    model = qat.prepare(Net(), recipe)
    bits = {name: model.get_submodule(name).spec.bits for name in activation_quantizers(model)}
    assert bits == {
        "input_quantizer": 8,
        "stem_quantizer": 4,
        "block.conv1_quantizer": 4,
        "block.conv2_quantizer": 4,
        "block.add_quantizer": 4,
        "adaptive_avg_pool2d_quantizer": 8,
    }
    assert model.fc.weight_quantizer.spec.bits == 8 and model.block.conv1.weight_quantizer.spec.bits == 4


def test_a_reader_that_does_not_get_its_grid_is_named() -> None:
    recipe = qat.QuantRecipe(overrides={"block.conv1": {"activation": {"bits": 4}}})  # the residual add reads it too
    model = qat.prepare(Net(), recipe)
    assert model.stem_quantizer.spec.bits == 8
    line = next(line for line in qat.summary(model).splitlines() if line.startswith("stem_quantizer"))
    assert "shared with a reader that asked for uint4 affine per tensor; not calibrated" in line


def test_shape_arithmetic_is_not_quantized() -> None:
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.fc = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            n = x.shape[0] * 1
            return self.fc(x.view(n, x.size(1) * x.size(2) * x.size(3)))

    model = qat.prepare(Reshapes(), example_inputs=torch.randn(3, 2, 2, 2))
    assert sorted(activation_quantizers(model)) == ["conv_quantizer", "input_quantizer"]


def test_functional_dropout_acts_by_mode() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(F.dropout(F.relu(self.fc(x)), 0.5, training=self.training))

    torch.manual_seed(0)
    for start in (Drops().train(), Drops().eval()):
        model = qat.prepare(start)
        x = torch.rand(4, 64)
        qat.calibrate(model, [x])
        model.eval()
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.equal(model(x), model(x))


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> object:
        return (self.fc(x), x) if self.training else self.fc(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: qat.prepare(qat.prepare(Net())),
            "prepare: the model holds quantizers already; prepare takes the float model",
        ),
        (lambda: qat.prepare(nn.Sequential(nn.ReLU())), "prepare: Sequential has no layer to quantize"),
        (
            lambda: qat.prepare(Branches()),
            "prepare: torch.fx cannot trace Branches: symbolically traced variables cannot be used as inputs to control"
            " flow; control flow that depends on tensor values has to move out of forward",
        ),
        (
            lambda: qat.prepare(TwoPaths()),
            "prepare: TwoPaths takes another path in training than in evaluation (auxiliary outputs?), and a prepared"
            " model has one path; switch that off, for torchvision's with aux_logits=False",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(overrides={"block.cnv1": {"skip": True}})),
            "prepare: the recipe's pattern 'block.cnv1' names no layer of the model; did you mean block.conv1,"
            " block.conv2?",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(rule="lqs"))),
            f"prepare: stem (weight): unknown quantizer 'lqs'; registered: {', '.join(registered_quantizers())};"
            " did you mean 'lsq'?",
        ),
        (
            lambda: qat.prepare(
                Net(), qat.QuantRecipe(weight=qat.QuantSpec(granularity="group", group_size=2))
            ),
            "prepare: stem (weight): group_size=2 does not divide the weight's 3 inputs; use 1, 3",
        ),

    ],
)  # fmt: skip
def test_errors_are_sentences(make: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == sentence


def test_the_probe_names_quantizers_that_never_run() -> None:
    model = qat.prepare(Net())
    model.add_submodule("orphan", create_quantizer(qat.QuantSpec()))
    with pytest.raises(ValueError, match=r"^prepare: these quantizers never run: orphan$"):
        probe(model, (torch.randn(1, 3, 8, 8),))


@pytest.mark.filterwarnings("ignore:a quantizer")
def test_summary_lists_every_layer_in_order() -> None:
    model = qat.prepare(Net())
    lines = qat.summary(model).splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert names == [
        "input_quantizer", "stem", "stem_quantizer", "block.conv1", "block.conv1_quantizer", "block.conv2",
        "block.conv2_quantizer", "block.add_quantizer", "adaptive_avg_pool2d_quantizer", "fc",
    ]  # fmt: skip
    assert lines[1].endswith("not calibrated")
    assert lines[4].endswith("input: stem_quantizer, folds block.bn1")
    qat.calibrate(model, [torch.randn(1, 3, 8, 8)])
    assert "not calibrated" not in qat.summary(model)


# torch 2.11's compiler makes an instance of a Function and warns about itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_runs_under_torch_compile_without_a_graph_break() -> None:
    torch.manual_seed(0)
    model = qat.prepare(Net().eval())
    x = torch.randn(2, 3, 8, 8)
    qat.calibrate(model, [x])
    for mode in (model.eval(), model.train()):
        compiled = torch.compile(mode, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), mode(x))
        gradients = [gradients_of(run, x) for run in (mode, compiled)]
        for name, eager in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], eager, rtol=1e-4, atol=1e-5, msg=name)
        torch._dynamo.reset()


def gradients_of(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    model = getattr(run, "_orig_mod", run)
    model.zero_grad()
    run(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class ModeConstant(nn.Module):
    """Multiplies by another constant in training: the kind of branch that tracing would bake in without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * (1.0 if self.training else 5.0)


def test_constants_that_depend_on_the_mode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^prepare: ModeConstant takes another path in training than in evaluation"):
        qat.prepare(ModeConstant())


def test_weights_read_as_plain_tensors_and_norms_are_listed() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 1)
            self.kernel = nn.Parameter(torch.randn(3, 4, 1, 1))
            self.norm = nn.GroupNorm(1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(F.conv2d(self.conv(x), self.kernel))

    assert qat.prepare(Reads()).meta[LEFT_IN_FLOAT] == {
        "kernel": "conv2d reads it as a plain tensor",
        "norm": "GroupNorm computes in float",
    }


def test_layers_with_hooks_stay_float_and_keep_them() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    net[0].register_forward_hook(lambda module, inputs, output: output * 100)
    model = qat.prepare(net)
    assert model.meta[LEFT_IN_FLOAT] == {"0": "it carries hooks or a reparametrised weight, which the twin would lose"}
    x = torch.randn(8, 4)
    qat.calibrate(model, [x])
    torch.testing.assert_close(model(x), net(x), rtol=0.1, atol=1.0)


def test_results_of_a_tuple_are_quantized_each_on_its_own() -> None:
    class Tuple(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.unbind(x, 1)  # type: ignore[return-value]

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
            self.split = Tuple()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.split(x)
            return self.a(parts[0]) + self.b(input=parts[1])

    torch.manual_seed(0)
    net = Uses().eval()
    model = qat.prepare(net)
    x = torch.randn(8, 2, 3) * torch.tensor([1.0, 100.0])[:, None]
    qat.calibrate(model, [x])
    torch.testing.assert_close(model(x), net(x), rtol=0.05, atol=1.0)
    assert len([name for name in activation_quantizers(model) if "getitem" in name]) == 2


def test_calibration_takes_the_weights_as_they_are_now() -> None:
    model = qat.prepare(Net().eval())
    with torch.no_grad():
        model.fc.weight.mul_(50)
    before = model.fc.weight_quantizer.scale.detach().clone()
    qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
    torch.testing.assert_close(model.fc.weight_quantizer.scale.detach(), 50 * before)


@pytest.mark.parametrize("init", ["minmax", "percentile", "mse", "lsq"])
def test_a_weights_grid_without_negatives_refuses_negative_weights(init: Any) -> None:
    with pytest.raises(ValueError, match=r"^prepare: stem \(weight\): values down to -\d\.\d+, which its grid"):
        qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(signed=False, init=init)))


def test_a_grid_without_negatives_refuses_negative_values() -> None:
    recipe = qat.QuantRecipe(activation=qat.QuantSpec(signed=False, symmetric=True))
    model = qat.prepare(Net().eval(), recipe)
    with pytest.raises(ValueError, match=r"^calibrate: quantizer '[\w.]+': values down to -\d\.\d+, which its grid"):
        qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
