"""One training step of a graph without the optimizer, all that comes of it, and how two such steps differ."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

TOLERANCE, NEGLIGIBLE = 1e-3, 1e-5
"""Of a difference: relative to the tensor's norm, and of a gradient to the norm of the largest gradient. That of a bias
in front of a BatchNorm is nothing but rounding."""


@dataclass
class Results:
    """What comes of a step.

    Attributes:
        answers: the model's.
        gradients: of parameters and inputs by name, as far as there are any.
        buffers: after the step.
    """

    answers: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class NoGradientsError(Exception):
    """The model answers, but its answers have no gradients; its cause is what torch raised."""


def training_step(interpreter: fx.Interpreter, model: nn.Module, inputs: list[Any]) -> Results:
    """Forward and backward from what the buffers are now; they are put back.

    Args:
        interpreter: of a graph.
        model: whose graph it is.
        inputs: what the graph is given.

    Raises:
        NoGradientsError: if forward runs and backward does not.
    """
    _seed(model)
    wanted: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = pytree.tree_map(detached, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted |= {f"input {number}": leaf for number, leaf in enumerate(leaves)}
    # As of a tensor that something computed: the model may write into what it is given.
    copied = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, copied)
    with kept_buffers(model.modules()):
        answers = [leaf for leaf in pytree.tree_leaves(interpreter.run(*copied)) if isinstance(leaf, Tensor)]
        try:
            gradients = _gradients(answers, wanted)
        except Exception as error:
            raise NoGradientsError from error
        state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Results([y.detach() for y in answers], gradients, state)


def _gradients(answers: list[Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the answers' sum, every element with a weight of its own."""
    parts = [torch.view_as_real(y) if y.is_complex() else y for y in answers if y.requires_grad]
    if not parts or not wanted:
        return {}
    loss: Any = sum((noise(y) * y).sum() for y in parts)
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}


def detached(x: Any) -> Any:
    """A copy of a tensor that nothing computed."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def noise(y: Tensor) -> Tensor:
    """Numbers of a tensor's shape, the same whenever they are asked for."""
    generator = torch.Generator("cpu").manual_seed(y.numel())
    return torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)


def _seed(model: nn.Module) -> None:
    """The random numbers of the CPU and of the model's devices; `torch.manual_seed` would touch all others too."""
    torch.default_generator.manual_seed(0)
    for device in _cuda_devices(model):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)


def _cuda_devices(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in model.parameters() if tensor.is_cuda}


@contextlib.contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which modules have the buffers that they had, with the values that they had."""
    registered = [(module._buffers, dict(module._buffers)) for module in modules]
    values = [
        (buffer, buffer.detach().clone()) for _, buffers in registered for buffer in buffers.values() if buffer is not None
    ]  # fmt: skip
    try:
        yield
    finally:
        for buffers, before in registered:
            buffers.clear()
            buffers.update(before)
        for buffer, value in values:
            buffer.data.copy_(value)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """A context that leaves no trace: no buffers, flags or random numbers change, and no hook of the user's is called.

    Hooks of torch.nn.utils stay: they compute the weight of a pruned or a normalised layer.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    hooks = [(vars(module), _hooks_of(module)) for module in modules]
    flags = [(vars(module), _flags_of(module)) for module in modules]
    waiting = [parameter._backward_hooks for parameter in parameters]
    with (
        torch.random.fork_rng([device.index for device in _cuda_devices(model)]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        kept_buffers(modules),
    ):
        try:
            for attributes, found in hooks:
                attributes.update({name: _of_torch(waits) for name, waits in found.items()})
            for parameter in parameters:
                parameter._backward_hooks = None
            yield
        finally:
            for attributes, found in (*hooks, *flags):
                attributes.update(found)
            for parameter, before in zip(parameters, waiting, strict=True):
                parameter._backward_hooks = before


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: vars(module)[name] for name in names}


def _of_torch(hooks: dict[int, Any]) -> dict[int, Any]:
    """Those of torch.nn.utils."""
    kept = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils.")}
    return type(hooks)(kept)


def _flags_of(module: nn.Module) -> dict[str, Any]:
    """Plain numbers and words that a forward may change: a counter, say."""
    plain = (int, float, str, bool, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, plain)}


def difference(expected: Results, found: Results) -> str | None:
    """What the second step gives otherwise than the first; None if nothing but the order of sums."""
    if len(expected.answers) != len(found.answers):
        return f"{len(found.answers)} answers instead of {len(expected.answers)}"
    norms = [float(tensor[tensor.isfinite()].double().norm()) for tensor in expected.gradients.values()]
    negligible = 1e-7 + NEGLIGIBLE * max(norms, default=0.0)
    pairs = [("an answer", y, x, 1e-7) for y, x in zip(expected.answers, found.answers, strict=True)]
    for kind, ours, theirs, least in (
        ("the gradient of", expected.gradients, found.gradients, negligible),
        ("the buffer", expected.buffers, found.buffers, 1e-7),
    ):
        for name in sorted(ours.keys() ^ theirs.keys()):
            return f"{kind} {name} is missing" if name in ours else f"{kind} {name} should not exist"
        pairs += [(f"{kind} {name}", tensor, theirs[name], least) for name, tensor in ours.items()]
    return next((f"{name} {wrong}" for name, *pair in pairs if (wrong := _gap(*pair)) is not None), None)


def _gap(expected: Tensor, found: Tensor, least: float) -> str | None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    finite = expected.isfinite()
    same = torch.equal(expected[~finite].nan_to_num(), found[~finite].nan_to_num())
    if not same or not torch.equal(finite, found.isfinite()):
        return f"has {int((~found.isfinite()).sum())} values that are not finite instead of {int((~finite).sum())}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected[finite].to(wide), found[finite].to(wide)
    gap, size = float((a - b).norm()), float(a.norm())
    return None if gap <= TOLERANCE * size + least else f"differs by {gap / max(size, 1e-30):.2g} of its length"
