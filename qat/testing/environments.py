"""Checks in other surroundings: meta tensors, the compiler, other memory layouts."""

from typing import Any

import torch
from torch import Tensor

from qat.silence import warnings_ignored
from qat.testing.comparison import short, uneven
from qat.testing.estimator import Estimator, Inputs, as_leaves, pull_back
from qat.testing.report import GradcheckError, raising
from qat.testing.variants import with_axes


def check_meta(estimator: Estimator, inputs: Inputs) -> str:
    """Meta tensors give the shape, dtype and device of output and gradients without any data."""
    for dtype in (torch.float64, torch.bfloat16):
        y, expected = estimator.gradients(tuple(tensor.to(dtype) for tensor in inputs))
        words = f"{short(dtype)}: "
        with raising(words):
            got, gradients = estimator.gradients(
                tuple(tensor.to("meta", dtype) for tensor in inputs), torch.empty_like(y, device="meta")
            )
        _require_alike(f"{words}output", got, y)
        for slot, (mine, theirs) in enumerate(zip(gradients, expected, strict=True)):
            if (mine is None) != (theirs is None):
                gets = "no gradient" if mine is None else "a gradient"
                raise GradcheckError(f"{words}slot {slot} gets {gets}, unlike on the CPU")
            if mine is not None and theirs is not None:
                _require_alike(f"{words}gradient of slot {slot}", mine, theirs)
    return "float64 and bfloat16"


def _require_alike(words: str, got: Tensor, expected: Tensor) -> None:
    mine = f"{short(got.dtype)}{list(got.shape)} on {got.device.type}"
    theirs = f"{short(expected.dtype)}{list(expected.shape)} on meta"
    if mine != theirs:
        raise GradcheckError(f"{words}: got {mine}, expected {theirs}")


def check_compile(estimator: Estimator, inputs: Inputs) -> str:
    """`torch.compile(fullgraph=True)` gives the same output and gradients; the output is no alias of an input."""
    for slot, tensor in enumerate(inputs):
        if estimator.output(inputs).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raise GradcheckError(
                f"the output shares its memory with slot {slot}: return a new tensor, else the compiler of torch 2.11 "
                "loses the gradient"
            )
    y, expected = estimator.gradients(inputs)

    def whole(*tensors: Tensor) -> Any:
        return estimator.function(*tensors)

    with warnings_ignored():  # the compiler's own, which differ between torch versions
        torch.compiler.reset()
        try:
            with raising("torch.compile "):
                compiled = torch.compile(whole, fullgraph=True, backend=estimator.backend)
                leaves = as_leaves(inputs)
                got = compiled(*leaves)
                gradients = pull_back(got, leaves, uneven(y))
        finally:
            torch.compiler.reset()
    estimator.require_close("compiled output", got, y, inputs[0])
    estimator.require_same_gradients("compiled: ", gradients, expected, inputs)
    backend = estimator.backend if isinstance(estimator.backend, str) else "the given backend"
    return f"fullgraph with {backend}"


def check_layouts(estimator: Estimator, inputs: Inputs) -> str:
    """A non-contiguous x or incoming gradient changes no value; channels_last stays channels_last."""
    x = with_axes(estimator, inputs[0], 4).contiguous()
    arranged = (x, *inputs[1:])
    y, expected = estimator.gradients(arranged)
    layouts = _layouts(x)
    for name, variant in layouts.items():
        words = f"{name}: "
        with raising(words):
            cotangent = _layouts(uneven(y)).get(name, uneven(y))
            got, gradients = estimator.gradients((variant, *inputs[1:]), cotangent)
        estimator.require_close(f"{words}output", got, y, x)
        estimator.require_same_gradients(words, gradients, expected, arranged)
        spoilt = name == "channels_last" and not got.is_contiguous(memory_format=torch.channels_last)
        if spoilt and got.shape == x.shape:
            raise GradcheckError(f"{words}the output has strides {got.stride()}, expected {variant.stride()}")
    words = "expanded incoming gradient: "
    with raising(words):
        _, gradients = estimator.gradients(arranged, torch.ones((), dtype=y.dtype).expand(y.shape))
    _, expected = estimator.gradients(arranged, torch.ones_like(y))
    estimator.require_same_gradients(words, gradients, expected, arranged)
    return f"{', '.join(layouts) or 'expanded gradient'} for x of shape {tuple(x.shape)}"


def _layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values with other strides."""
    found = {}
    if x.ndim:
        room = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))
        found["every second element"] = room[..., ::2].copy_(x)
    if x.ndim > 1:
        found["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.ndim == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    return found
