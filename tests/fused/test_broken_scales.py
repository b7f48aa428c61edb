"""Scales that an optimizer broke: kernels, formulas and plain operations read them alike, with repair and without."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import qat
from qat.fused.functions.codes import decode
from qat.fused.functions.norm_activation import quantize_chain
from qat.fused.functions.products import multiply
from qat.fused.functions.scale_repair import repair
from qat.kernels import kernels_by_formula, plain_formulas
from qat.kernels.cpu import compiler
from qat.quantizer import Quantizer, create_quantizer

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

BROKEN = [math.nan, math.inf, -math.inf, 0.0, -1.0]
PATHS: dict[str, Callable[[], AbstractContextManager[None]]] = {"C": nullcontext, "formula": kernels_by_formula}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def calibrated(spec: qat.QuantSpec) -> Quantizer:
    quantizer = create_quantizer(spec, "activation").train()
    quantizer.set_range(torch.tensor(-2.0), torch.tensor(2.0))
    return quantizer


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel()).view(y.shape)).sum(), inputs)]


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("grad_scale", ["sample", "relative"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", BROKEN)
def test_of_a_tensor(broken: float, path: str, grad_scale: str, repaired: bool) -> None:
    quantizer = calibrated(qat.QuantSpec(signed=False, symmetric=False, grad_scale=grad_scale))  # type: ignore[arg-type]
    quantizer.scale.data.fill_(broken)
    x = values(4, 8)
    if repaired:
        repair(quantizer)
        assert bool(quantizer.scale.isfinite())
    with plain_formulas():
        expected = gradients(quantizer.quantize(x), x, quantizer.scale)
    with PATHS[path]():
        codes = quantize_chain(x, quantizer)
        assert not isinstance(codes, Tensor), "it fell back to the plain operations"
        found = gradients(decode(codes), x, quantizer.scale)
    assert all(bool(each.isfinite().all()) for each in found)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_of_a_weight(broken: float, path: str, per: str) -> None:
    layer = qat.QuantLinear(8, 6, weight_spec=qat.QuantSpec(granularity=per)).train()  # type: ignore[arg-type]
    layer.weight_quantizer.scale.data.view(-1)[0] = broken
    layer.input_quantizer = None
    quantizer, x = calibrated(qat.QuantSpec(signed=False, symmetric=False)), values(4, 8)
    weight, scale = layer.weight, layer.weight_quantizer.scale
    with plain_formulas():
        y = F.linear(quantizer.quantize(x), layer.weight_quantizer.quantize(weight), layer.bias)
        expected = gradients(y, weight, scale)
    with PATHS[path]():
        found = gradients(multiply(layer, quantize_chain(x, quantizer), quantizer), weight, scale)
    assert all(bool(each.isfinite().all()) for each in found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
