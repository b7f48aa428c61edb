"""Run by test_triton.py where Triton interprets: kernels, chains, the engine. Prints how often it compared each."""

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.codes.operators.add import _add_quantize_backward
from qat.codes.operators.norm import _norm_quantize_backward, sizes_of
from qat.functional.lsq import LSQFunction, LSQPlusFunction
from qat.kernels import dispatch, plain_formulas
from qat.kernels.triton import chains, quantizers
from tests.kernels import test_kernels_integers as integers

CLIPS = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0))
SHAPES = (
    ((4, 3, 5, 7), False),
    ((4, 3, 5, 7), True),
    ((2, 130, 3, 4), True),
    ((2, 5, 20, 20), False),
    ((70, 20), False),
)
PARTS = ((True, True), (True, False), (False, False))


QUANTIZED = (((5,), False), ((3, 700), False), ((3, 700), True), ((4, 3, 5, 9), True), ((2, 8, 6, 7), False))
"""A shape, and whether each row has a scale."""
ODD = [0.625, math.nan, math.inf, -math.inf, 0.125, 0.375]


def compare_quantizer(x: Tensor, grad: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int) -> None:
    assert quantizers.applies(x, scale, zero)
    leaves = [each.detach().clone().requires_grad_() for each in (x, scale, zero) if each is not None]
    with plain_formulas():
        y = (LSQFunction if zero is None else LSQPlusFunction).apply(*leaves, low, high, 1.0)
        wanted = torch.autograd.grad(y, leaves, grad)
    kernels, given = quantizers.TritonKernels, (x, scale, zero, low, high)
    got, grads = kernels.quantize(*given), kernels.gradients(grad, *given)
    close_to = 2**-7 if x.dtype is torch.bfloat16 else 0  # the interpreter cuts digits off, where devices round
    torch.testing.assert_close(got, y, rtol=close_to, atol=0, equal_nan=True)
    assert got.stride() == x.stride()
    assert torch.equal(grads[0], wanted[0]) and grads[0].dtype is x.dtype
    for one, other in zip(grads[1:], wanted[1:], strict=False):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3, equal_nan=True)
    assert kernels.gradients(grad, *given, (False, True, True))[0] is None


def compare_quantizers() -> int:
    tried = 0
    for dtype, (shape, per_row) in itertools.product((torch.float32, torch.bfloat16, torch.float16), QUANTIZED):
        zeros = (None,) if per_row else (None, torch.tensor(3.4), torch.tensor(math.nan))
        for zero, (low, high) in itertools.product(zeros, ((-8, 7), (0, 255), (-(2**30), 2**30))):
            x, grad = (torch.randn(shape) * 9).to(dtype), torch.randn(shape).to(dtype)
            x.view(-1)[:5] = torch.tensor(ODD[1:] if len(shape) > 1 else ODD[:5]).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
            rows = (shape[0], *[1] * (len(shape) - 1))
            compare_quantizer(x, grad, torch.rand(rows) + 0.25 if per_row else torch.tensor(0.25), zero, low, high)
            tried += 1
    return tried


def drawn(shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor with means far from 0, and a gradient."""
    spread = torch.randn(shape[1]).view(-1, *[1] * (len(shape) - 2)) * 5
    pair = [(torch.randn(shape) * 2 + spread).to(dtype), torch.randn(shape).to(dtype)]
    y, grad = (each.to(memory_format=torch.channels_last) for each in pair) if last else pair
    return y, grad


def grid_for(affine: bool, clip: tuple[float, float]) -> chains.Grid:
    zero = torch.tensor(100.0) if affine else None
    levels = [0.0, 255.0, 0.0, 0.01, 0.0] if affine else [-128.0, 127.0, 128.0, 0.01, 1.0]
    return chains.Grid(torch.tensor(0.05), torch.tensor(0.002), zero, levels, clip)


def expected(z: Tensor, grid: chains.Grid) -> tuple[Tensor, Tensor]:
    """Values of the formula in float64, and where the last digit of z decides about value or gradient."""
    (low, high, *_), zero, step = grid.levels, float(grid.zero_point or 0), float(grid.scale)
    v = z.clamp(*grid.bounds) / step
    near = ((v - v.floor()) - 0.5).abs() < 1e-3
    for end in (low - zero, high - zero, *(bound / step for bound in grid.bounds)):
        near |= (z / step - end).abs() < 1e-3
    return (v.round() + zero).clamp(low, high).sub(zero) * step, near


def close(got: Tensor, wanted: Tensor, share: float, least: float = 0.0) -> None:
    gap = (got.double() - wanted).norm()
    assert gap <= share * wanted.norm() + least, (float(gap), float(wanted.norm()))


def compare_norm(y: Tensor, grad: Tensor, grid: chains.Grid, follows: bool, moves: bool) -> None:
    count = y.shape[1]
    gamma, beta, mean, var = torch.rand(count) + 0.5, torch.randn(count), torch.randn(count), torch.rand(count) + 0.5
    kept, wide, axes = (mean.double(), var.double()), y.double(), [0, *range(2, y.dim())]
    sizes = sizes_of(y)
    assert sizes is not None
    shape = chains.Shape.of(*sizes)
    norm = chains.Norm(gamma, beta, mean, var, torch.tensor(2), 1e-5, 0.1 if moves else None, follows)
    known = chains.settled_norm(y, shape, norm, grid)
    batch_var, batch_mean = torch.var_mean(wide, axes, correction=0)
    assert int(norm.tracked) == 2 + moves
    if moves:
        values = y.numel() // count
        close(mean, kept[0].lerp(batch_mean, 0.1), 1e-6)
        close(var, kept[1].lerp(batch_var * values / (values - 1), 0.1), 1e-6)
    used_mean, used_var = (batch_mean, batch_var) if follows else kept
    inverse = torch.rsqrt(used_var + 1e-5)
    alpha, along = inverse * gamma, [-1, *[1] * (y.dim() - 2)]
    z = (wide - used_mean.view(along)) * alpha.view(along) + beta.double().view(along)
    wanted, near = expected(z, grid)
    got = chains.norm_quantize(y, shape, known, grid)
    assert got.stride() == y.stride() and got.dtype is y.dtype
    share = 1e-6 if y.dtype is torch.float32 else 2**-7
    assert not bool((((got.double() - wanted).abs() > share * wanted.abs() + 1e-9) & ~near).any())
    grad = torch.where(near, 0, grad)
    found = chains.norm_quantize_backward(grad, y, shape, known, grid, follows)
    tensors = [None if each is None else each.double() for each in grid[:3]]
    terms = [gamma.double(), beta.double(), used_mean, inverse]
    reference = _norm_quantize_backward(
        grad.double(), wide, terms, list(grid.bounds), tensors, grid.levels, follows, True
    )
    close(found[0], reference[0], 2e-5 if y.dtype is torch.float32 else 1e-2)
    for one, other in zip(found[1:], reference[1:], strict=True):
        close(one, other, 2e-5, 1e-4 * float(grad.float().norm()))


def compare_sum(a: Tensor, b: Tensor, grad: Tensor, grid: chains.Grid) -> None:
    codes = [(each.float() * 4).round().clamp(-128, 127) for each in (a, b)]
    a, b = (each.div(4).to(grad.dtype) for each in codes)
    wanted, near = expected(a.double() + b.double(), grid)
    got = chains.sum_quantize(a, b, grid, torch.float32)
    assert not bool((((got - wanted).abs() > 1e-6 * wanted.abs() + 1e-9) & ~near).any())
    grad = torch.where(near, 0, grad)
    found, scale = chains.sum_quantize_backward(grad, a, b, grid, True)
    packed = [(each + 128).to(torch.uint8) for each in codes]
    qparams, tensors = torch.tensor([0.25, 128.0]), list(grid[:3])
    reference = _add_quantize_backward(
        grad.float(), *packed, qparams, qparams, list(grid.bounds), tensors, list(grid.levels)
    )
    assert found is not None and torch.equal(found.float(), reference[0])
    close(scale, reference[1].double(), 2e-5, 1e-5 * float(grad.float().norm()))


class Net(nn.Module):
    """Every chain: with a norm and each clip, without one, sums, grouped and pointwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.two = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.c, self.fc, self.six = nn.Conv2d(8, 8, 1), nn.Linear(8, 4), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(self.a(x)))
        y = F.relu(x + self.c(self.six(self.two(self.b(x)))))
        return self.fc(y.mean((2, 3)))  # type: ignore[no-any-return]


def compare_engine(layout: torch.memory_format, bits: int) -> None:
    """Three steps of a model whose layers pass values on, and of its copy operation by operation."""
    x, labels = torch.randn(4, 3, 9, 7).to(memory_format=layout), torch.arange(4)
    spec = qat.QuantSpec(bits=bits)
    model = qat.prepare(Net(), qat.QuantRecipe(weight=spec, activation=spec), example_inputs=x)
    qat.calibrate(model, [x])
    pair = [model.train(), copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in pair]
    for _ in range(3):
        loss = F.cross_entropy(pair[0](x), labels)
        with plain_formulas():
            plain = F.cross_entropy(pair[1](x), labels)
            plain.backward()
        loss.backward()
        for (name, mine), other in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None, name
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    for mine, other in zip(pair[0].buffers(), pair[1].buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    (verdict,) = pair[0]._verdicts.values()
    assert verdict.distrusted == (), verdict


class Gated(nn.Module):
    """Products of bytes and of floats, a pool, a table, a gate, sums, and a mean between codes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 1, stride=2), nn.Conv2d(16, 8, 1)
        self.d, self.e, self.f = nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.g, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(F.relu(self.b(F.max_pool2d(F.relu(self.g(F.relu(self.a(x)))), 2))))
        y = F.hardswish(self.d(x))
        gate = torch.sigmoid(self.f(F.relu(self.e(y.mean((2, 3), keepdim=True)))))
        z = F.relu(y * gate + x)
        return self.fc((z + self.c(self.b(z).repeat(1, 1, 2, 2)[:, :, : z.shape[2], : z.shape[3]])).mean((2, 3)))


def evaluated(net: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    """A model that has not been evaluated yet, its images, and the result of a copy."""
    x = torch.randn(20, 3, 10, 9)
    model = qat.prepare(net, example_inputs=x).eval()
    qat.calibrate(model, [x])
    with torch.no_grad():
        return copy.deepcopy(model), x, model(x)


def compare_evaluation(models: list[tuple[nn.Module, Tensor, Tensor]]) -> int:
    """The tests of the kernels in C, here in Triton, and models: to the bit as on the CPU."""
    for shape, layout in itertools.product(integers.SHAPES, integers.LAYOUTS):
        integers.test_sums_and_products_of_codes(shape, layout)
        for to in (integers.TO, None):
            integers.test_what_follows_sums(shape, to)
    kinds: set[torch.dtype | None] = set()
    for model, x, wanted in models:
        for layout in integers.LAYOUTS:
            with torch.no_grad():
                assert torch.equal(model(x.to(memory_format=layout)), wanted) and model.evaluates_on_codes
            kinds |= {getattr(step, "kind", None) for step in model._engine_state.evaluator.program.modules()}
        spoilt = x.clone()
        spoilt[0, 0, 0, 0] = math.nan
        with torch.no_grad():
            assert model(spoilt).isnan().all() and torch.equal(model(x), wanted)
    assert {torch.int8, torch.float32, torch.uint8} <= kinds
    return len(models)


def main() -> None:
    torch.manual_seed(0)
    quantized, tried = compare_quantizers(), 0
    cases = list(itertools.product((torch.float32, torch.bfloat16), SHAPES, CLIPS, (True, False)))
    for dtype, (shape, last), clip, affine in cases[::3]:  # the interpreter is slow; 3 and 2 share no factor
        y, grad = drawn(shape, last, dtype)
        for follows, moves in PARTS:
            compare_norm(y, grad, grid_for(affine, clip), follows, moves)
        compare_sum(y, y.flip(0), grad, grid_for(affine, clip))
        tried += 4
    models = [evaluated(net) for net in (Net(), Gated())]
    dispatch.TRITON_DEVICES.add("cpu")
    dispatch.triton_kernels.cache_clear()
    launched = []
    for name in ("norm_quantize", "sum_quantize"):
        kernel = getattr(chains, name)
        setattr(chains, name, lambda *given, kernel=kernel: launched.append(kernel) or kernel(*given))
    for layout, bits in ((torch.channels_last, 8), (torch.contiguous_format, 4)):
        compare_engine(layout, bits)
        tried += 1
    assert launched.count(kernel) > 12 and len({*launched}) == 2
    print(quantized, tried, compare_evaluation(models))


if __name__ == "__main__":  # pytest imports every file for its doctests
    main()
