"""What tests of `prepare` share: a small residual net, names of quantizers, and the comparison with the float model."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import qat
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer


class Block(nn.Module):
    """A residual block that reuses one ReLU, as torchvision's do."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2)
        self.block, self.fc = Block(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool(F.relu(self.stem(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, always the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Plain(nn.Module):
    """A model whose forward is a function of itself and its inputs, for what fits no ready module.

    It holds copies of its parts, with parameters of its own that are always the same. With other inputs than x its
    class is one of its own, whose forward has their names.
    """

    def __new__(cls, forward: Callable[..., Any] | None = None, **parts: Any) -> Any:
        own = forward is not None and inspect.getfullargspec(forward).args[1:] != ["x"]
        return super().__new__(type(cls.__name__, (cls,), {"forward": forward}) if own else cls)

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in copy.deepcopy(parts).items():
            setattr(self, name, part)
        self._forward = forward
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                values = draw(*parameter.shape, seed=seed)
                inputs = parameter.numel() // max(parameter.shape[0], 1) if parameter.dim() else 1
                parameter.copy_(values / inputs**0.5 if parameter.dim() > 1 else 0.5 + 0.3 * values)

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


@contextmanager
def refused(sentence: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """A context that ends with an error of exactly this message."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == sentence


def assert_takes_float_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """A float checkpoint lacks a prepared model's quantizers, and has no key too many."""
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == [] and all("quantizer" in key for key in result.missing_keys)


def activation_quantizers(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, Quantizer) and m.role == "activation"]


def input_grid(model: fx.GraphModule, name: str) -> Quantizer:
    """The quantizer that a layer's call passes to it."""
    (node,) = [node for node in model.graph.nodes if node.op == "call_module" and node.target == name]
    found = model.get_submodule(str(node.kwargs["input_quantizer"].target))
    assert isinstance(found, Quantizer)
    return found


def calls(model: nn.Module) -> list[str]:
    assert isinstance(model, fx.GraphModule)
    return [str(node.target) for node in model.graph.nodes if node.op == "call_module"]


class Blind:
    """An observer that sees nothing: a quantizer that has one passes its tensor as it is."""

    def update(self, x: Tensor) -> None:
        pass


def without_quantizers(model: nn.Module) -> nn.Module:
    """A copy of a prepared model whose quantizers are the identity: it has to compute what the float model does."""
    passing = copy.deepcopy(model)
    for module in passing.modules():
        if isinstance(module, Quantizer):
            module.observer = Blind()  # type: ignore[assignment]
            module.register_forward_hook(lambda *given: given[-1].clone())  # as in use, its result is new memory
    return passing


def assert_computes_as(
    net: nn.Module, model: nn.Module, *args: Any, modes: tuple[bool, ...] = (False, True), **kwargs: Any
) -> None:
    """The prepared model without its quantizers gives the float model's outputs, gradients and running statistics."""
    for training in modes:
        # Dropouts draw in the same order, so the same seed makes the same masks.
        expected, passing = copy.deepcopy(net).train(training), without_quantizers(model).train(training)
        wanted, found = (_run(module, args, kwargs) for module in (expected, passing))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        state = passing.state_dict()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
        gradients = {name: p.grad for name, p in passing.named_parameters(remove_duplicate=False)}
        for name, parameter in expected.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def prepared_alike(net: nn.Module, x: Any, recipe: qat.QuantRecipe | None = None) -> Any:
    """The prepared model, which computes as the float one."""
    model = qat.prepare(net, recipe, example_inputs=x)
    assert_computes_as(net, model, x)
    return model


def prepared_near(net: nn.Module, x: Any, recipe: qat.QuantRecipe | None = None) -> Any:
    """The prepared model, which computes as the float one and is near it on its grids."""
    model = prepared_alike(net, x, recipe)
    assert_close_to_float(net, model, x)
    return model


def prepared_whole(net: nn.Module, x: Any, left: Mapping[str, str] | None = None) -> Any:
    """The prepared model, in one graph with nothing else left in float, which computes as the float one, near it."""
    model = prepared_near(net, x)
    assert notes_of(model, LEFT_IN_FLOAT) == (left or {})
    return model


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:
    torch.manual_seed(0)
    result = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors:
        sum((tensor * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in tensors).backward()
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def assert_close_to_float(net: nn.Module, model: nn.Module, x: Any, error: float = 0.05) -> None:
    """Calibrated on this input, the prepared model is as near as 8 bits are: RMS error over the RMS of the output."""
    inputs = dict(x) if isinstance(x, Mapping) else {}
    qat.calibrate(model, [x])
    with torch.no_grad():
        wanted, found = (
            copy.deepcopy(module).eval()(**inputs) if inputs else copy.deepcopy(module).eval()(x)
            for module in (net, model)
        )
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert float((ours - theirs).square().mean().sqrt()) <= error * float(theirs.square().mean().sqrt())
