"""Checks in other surroundings: meta tensors, the compiler, other memory layouts."""

from typing import Any

import torch
from torch import Tensor

from qat.silence import warnings_ignored
from qat.testing.comparison import require_close, require_same_gradients, uneven
from qat.testing.estimator import Estimator, Inputs, as_leaves, pull_back
from qat.testing.report import GradcheckError, raising
from qat.testing.variants import with_axes


def check_meta(estimator: Estimator, inputs: Inputs) -> str:
    """Meta tensors give the shape, dtype and device of output and gradients without any data.

    Raises:
        GradcheckError: with what differs.
    """
    for dtype in (torch.float64, torch.bfloat16):
        y, expected = estimator.gradients(tuple(tensor.to(dtype) for tensor in inputs))
        words = f"{_short(dtype)}: "
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
    mine = f"{_short(got.dtype)}{list(got.shape)} on {got.device.type}"
    theirs = f"{_short(expected.dtype)}{list(expected.shape)} on meta"
    if mine != theirs:
        raise GradcheckError(f"{words}: got {mine}, expected {theirs}")


def check_compile(estimator: Estimator, inputs: Inputs) -> str:
    """`torch.compile(fullgraph=True)` gives the same output and gradients; the output is no alias of an input.

    Raises:
        GradcheckError: with the first slot and element that differ.
    """
    for slot, tensor in enumerate(inputs):
        if _same_memory(estimator.output(inputs), tensor):
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
    require_close("compiled output", got, y, estimator.rtol, estimator.atol, inputs[0])
    require_same_gradients("compiled: ", gradients, expected, inputs, estimator.rtol, estimator.atol)
    backend = estimator.backend if isinstance(estimator.backend, str) else "the given backend"
    return f"fullgraph with {backend}"


def _same_memory(y: Tensor, tensor: Tensor) -> bool:
    return y.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def check_layouts(estimator: Estimator, inputs: Inputs) -> str:
    """A non-contiguous x or incoming gradient changes no value; channels_last stays channels_last.

    Raises:
        GradcheckError: with the layout, slot and element that differ.
    """
    x = with_axes(estimator, inputs[0], 4).contiguous()
    y, expected = estimator.gradients((x, *inputs[1:]))
    layouts = _layouts(x)
    for name, variant in layouts.items():
        words = f"{name}: "
        with raising(words):
            cotangent = _layouts(uneven(y)).get(name, uneven(y))
            got, gradients = estimator.gradients((variant, *inputs[1:]), cotangent)
        require_close(f"{words}output", got, y, estimator.rtol, estimator.atol, x)
        require_same_gradients(words, gradients, expected, (x, *inputs[1:]), estimator.rtol, estimator.atol)
        spoilt = name == "channels_last" and not got.is_contiguous(memory_format=torch.channels_last)
        if spoilt and got.shape == x.shape:
            raise GradcheckError(f"{words}the output has strides {got.stride()}, expected {variant.stride()}")
    with raising("expanded incoming gradient: "):
        _, gradients = estimator.gradients((x, *inputs[1:]), torch.ones((), dtype=y.dtype).expand(y.shape))
    _, expected = estimator.gradients((x, *inputs[1:]), torch.ones_like(y))
    words = "expanded incoming gradient: "
    require_same_gradients(words, gradients, expected, (x, *inputs[1:]), estimator.rtol, estimator.atol)
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
