"""Kernels in Triton, by its interpreter on CPU tensors, against the formulas; and built for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qat.kernels import dispatch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch
from qat.functional.lsq import LSQFunction, LSQPlusFunction
from qat.kernels import plain_formulas
from qat.kernels.triton import quantizers as found

torch.manual_seed(0)
kernels, tried, odd = found.TritonKernels, 0, [float("nan"), float("inf"), -float("inf"), 0.125, 0.375]
SHAPES = ((5,), False), ((3, 700), False), ((3, 700), True), ((4, 3, 5, 9), True), ((2, 8, 6, 7), False)

def compare(x, grad, scale, zero, low, high):
    assert found.applies(x, scale, zero)
    leaves = [each.detach().clone().requires_grad_() for each in (x, scale, zero) if each is not None]
    with plain_formulas():
        y = (LSQFunction if zero is None else LSQPlusFunction).apply(*leaves, low, high, 1.0)
        wanted = torch.autograd.grad(y, leaves, grad)
    got = kernels.quantize(x, scale, zero, low, high)
    close = 2**-7 if x.dtype is torch.bfloat16 else 0  # the interpreter cuts digits off, where devices round
    torch.testing.assert_close(got, y, rtol=close, atol=0, equal_nan=True)
    assert got.stride() == x.stride()
    grads = kernels.gradients(grad, x, scale, zero, low, high)
    assert torch.equal(grads[0], wanted[0]) and grads[0].dtype is x.dtype
    for one, other in zip(grads[1:], wanted[1:]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3, equal_nan=True)
    assert kernels.gradients(grad, x, scale, zero, low, high, (False, True, True))[0] is None

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape, per_row in SHAPES:
        for zero in (None,) if per_row else (None, torch.tensor(3.4), torch.tensor(float("nan"))):
            for low, high in ((-8, 7), (0, 255), (-2**30, 2**30)):
                x, grad = (torch.randn(shape) * 9).to(dtype), torch.randn(shape).to(dtype)
                x.view(-1)[:5] = torch.tensor(odd if len(shape) > 1 else [0.625, *odd[1:]]).to(dtype)
                x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
                rows = (shape[0], *[1] * (len(shape) - 1))
                compare(x, grad, torch.rand(rows) + 0.25 if per_row else torch.tensor(0.25), zero, low, high)
                tried += 1
print(tried)
"""


def test_values_and_gradients_are_those_of_the_formula() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 99


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_they_are_built_for_a_card_with_wide_accesses(capability: int, dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat.kernels.triton import quantizers

    data, number = f"*{dtype}", "*fp32"
    for kernel, types in (
        (quantizers._quantize, [data, data, number, number, "i32", "i32", "fp32", "fp32"]),
        (quantizers._gradients, [data, data, data, number, number, number, "i32", "i32", "fp32", "fp32"]),
    ):
        constants = {"affine": True, "block": quantizers.BLOCK, **({"writes": True} if len(types) == 10 else {})}
        names = kernel.arg_names
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        wide = [place for place, kind in enumerate(types) if kind.startswith("*") or names[place] == "width"]
        source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in wide})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=quantizers.OPTIONS)
        assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]
        assert made.metadata.shared <= 64 and made.metadata.num_warps == 4


@pytest.mark.parametrize("off", [False, True])
def test_where_they_do_not_run_the_formula_does_and_the_log_says_why(
    off: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such card")

    monkeypatch.setattr("qat.kernels.triton.quantizers.TritonKernels.quantize", refuse)
    monkeypatch.setenv("QAT_KERNELS", "off" if off else "")
    dispatch.triton_kernels.cache_clear()
    with caplog.at_level("INFO", "qat.kernels"):
        assert dispatch.triton_kernels() is None
    dispatch.triton_kernels.cache_clear()
    (said,) = caplog.messages
    assert said.startswith("QAT_KERNELS=off: " if off else "no kernels in Triton (")
