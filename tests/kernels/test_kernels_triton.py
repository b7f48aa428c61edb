"""Triton's kernels against NumPy and the plain formulas: interpreted, compiled for a GPU, and on one if there is."""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_kernels_triton import CASES, EDGES, Case, computed, inputs, names, offered
from torch import Tensor

from qat.functional import lsq_plus_quantize, lsq_quantize
from qat.kernels import plain_formulas
from qat.kernels.triton import fake_quantizer
from qat.kernels.triton.layout import Layout, layout_of, tiling_of
from qat.kernels.triton.trial import Kind, plain_gradients, plain_quantize

ROOT = Path(__file__).resolve().parents[2]
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def in_numpy(case: Case) -> dict[str, Any]:
    """The formulas in float32, the sums in float64; with every sum that of the sizes of its terms."""
    x, scale, zero_point, grad = (None if tensor is None else tensor.float().numpy() for tensor in inputs(case))
    low, high = (np.float32(bound) for bound in case.bounds)
    zero = np.float32(0) if zero_point is None else np.clip(np.rint(zero_point), low, high)
    v = x / scale
    codes = np.clip(np.rint(v) + zero, low, high)
    inside = (v >= low - zero) & (v <= high - zero)
    terms = {"scale": grad * np.where(inside, np.rint(v) - v, np.clip(v, low - zero, high - zero))}
    terms["zero_point"] = grad * np.where(inside, 0, -scale)
    missing = x.ndim - scale.ndim
    shared = tuple(a for a in range(x.ndim) if a < missing or (scale.shape[a - missing] == 1 and x.shape[a] != 1))
    sums = {name: np.sum(term, axis=shared, dtype=np.float64).reshape(scale.shape) for name, term in terms.items()}
    sizes = {name: np.sum(np.abs(term), axis=shared).reshape(scale.shape) for name, term in terms.items()}
    y = torch.from_numpy(np.asarray((codes - zero) * scale))
    return {"y": y, "x": np.where(inside, grad, 0), "sums": sums, "sizes": sizes}


def narrowed(y: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """y in a narrower type; the interpreter cuts off the bits that bfloat16 has no room for, a GPU rounds."""
    if dtype is torch.bfloat16 and device == "cpu":
        y = (y.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    return y.to(dtype)


def check(case: Case, found: dict[str, Any], device: str) -> None:
    x, scale, zero_point, grad = inputs(case)
    expected = in_numpy(case)
    assert found["y"].dtype == x.dtype and found["y"].stride() == x.stride()
    assert torch.equal(found["y"], narrowed(expected["y"], case.dtype, device))
    grad_x, grad_scale, grad_zero = found["gradients"]
    assert grad_x.dtype == x.dtype and grad_x.stride() == x.stride()
    assert np.array_equal(grad_x.float().numpy(), expected["x"])
    assert (grad_zero is None) == (zero_point is None)
    for name, sums in (("scale", grad_scale), ("zero_point", grad_zero)):
        if sums is not None:
            assert sums.dtype == torch.float32 and sums.shape == scale.shape
            error = np.abs(sums.numpy() - expected["sums"][name])
            assert np.all(error <= 1e-6 * expected["sizes"][name]), name

    leaves = [leaf.requires_grad_() for leaf in (x, scale, zero_point) if leaf is not None]
    with plain_formulas():  # what a user gets without these kernels
        y = (lsq_quantize if zero_point is None else lsq_plus_quantize)(*leaves, *case.bounds)
        plain = torch.autograd.grad(y, leaves, grad)
    if not (device == "cpu" and case.dtype is torch.bfloat16):
        assert torch.equal(found["y"], y.detach())
    assert torch.equal(grad_x, plain[0])
    for name, ours, theirs in zip(("scale", "zero_point"), found["gradients"][1:], plain[1:], strict=False):
        assert np.all((ours - theirs).abs().numpy() <= 1e-5 * expected["sizes"][name]), name


def child(what: str, folder: Path, **environment: str) -> Any:
    """Run the cases' file as a script, and load what it saved."""
    answers = folder / f"{what}.pt"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
    script = Path(__file__).with_name("cases_kernels_triton.py")
    command = [sys.executable, "-W", "error", str(script), what, str(answers)]
    result = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(answers)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return child("interpreted", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@with_triton
@pytest.mark.parametrize("case", CASES, ids=names)
def test_interpreted_kernels_are_the_formula(case: Case, interpreted: Any) -> None:
    check(case, interpreted[case.name], "cpu")


@with_triton
def test_edges(interpreted: Any) -> None:
    found = interpreted["edges"]
    levels, passes = torch.tensor([edge[1] for edge in EDGES]), torch.tensor([edge[2] for edge in EDGES])
    assert torch.equal(found["y"].nan_to_num(99), levels.nan_to_num(99))
    assert torch.equal(found["affine"].nan_to_num(99), levels.nan_to_num(99))
    assert torch.equal(found["gradients"][0], passes.float())
    assert found["gradients"][1].isnan()
    for bad, expected in zip(found["bad grid"], [0.0, 1.0, math.nan, math.nan], strict=True):
        assert torch.equal(bad.nan_to_num(99), torch.tensor(expected).nan_to_num(99))
    with plain_formulas():
        one = torch.tensor(1.0)
        plain = [lsq_plus_quantize(one, one, torch.tensor(z), -4, 3) for z in (math.inf, -math.inf)]
    assert found["bad zero point"][0].isnan()
    assert found["bad zero point"][1:] == [plain[0], plain[1], plain[0]]


@with_triton
def test_gradients_come_in_any_order_and_only_if_wanted(interpreted: Any) -> None:
    found = interpreted["edges"]
    for pair in (found["order"], found["expanded"]):
        assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))
        assert pair[0][0].is_contiguous(memory_format=torch.channels_last)
    assert len(found["needs"]) == 8
    for needs, gradients in found["needs"]:
        assert [gradient is not None for gradient in gradients] == list(needs)
        for gradient, full in zip(gradients, found["order"][0], strict=True):
            assert gradient is None or torch.equal(gradient, full)
    assert torch.equal(*found["expanded scale"])
    assert all(torch.equal(y, found["types"][0]) for y in found["types"])


@with_triton
def test_applies_to_plain_dense_tensors_only(interpreted: Any) -> None:
    assert interpreted["edges"]["applies"] == [expected for _, expected in offered()]


@with_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter takes what the compiler does not; and only the instructions tell about rounding and width."""
    for name, ptx in child("compiled", tmp_path).items():
        assert "div.rn.f32" in ptx and "div.full" not in ptx, name
        assert "max.NaN.f32" in ptx and "min.NaN.f32" in ptx, name
        assert "fma." not in ptx, name
        assert not any(atomic in ptx for atomic in ("atom.", "red.global")), name
        if name != "large":  # its width is not known to be a multiple of 16
            assert "ld.global.v4.b32" in ptx, f"{name}: no 16-byte loads"
        if name.startswith("quantize") and "bf16" in name:
            assert "cvt.rn.bf16" in ptx, name


def test_layouts_find_the_scale_of_every_element() -> None:
    """Every order in memory, with scales on every set of axes; what the kernels compute, in integers."""
    shape, found = (2, 3, 4, 5), 0
    for order, mask in itertools.product(itertools.permutations(range(4)), itertools.product((0, 1), repeat=4)):
        x = torch.empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
        scales = tuple(size if scaled else 1 for size, scaled in zip(shape, mask, strict=True))
        layout = layout_of(shape, x.stride(), scales)
        if layout is None:
            continue
        found += 1
        indices = torch.arange(math.prod(scales)).view(scales).expand(shape)
        in_memory = indices.permute(order).reshape(layout.height, layout.width)
        if layout.per_column:
            assert torch.equal(in_memory, torch.arange(layout.width).expand_as(in_memory))
        else:
            row = torch.arange(layout.height)
            channel = row // layout.cycle * layout.channels + row % layout.channels
            assert torch.equal(in_memory, channel[:, None].expand_as(in_memory))
    assert found == 197  # of 384: 175 have scales in another order than the memory, 12 mix the axes too often


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sums", [True, False])
def test_tiles_cover_every_layout(itemsize: int, sums: bool) -> None:
    for sizes in itertools.product((1, 7), (1, 5, 3000), (1, 3, 64, 100), (1, 9, 147, 576, 4608, 10**6)):
        layout = Layout(*sizes)
        rows, cols, steps, across, down = tiling_of(layout, itemsize, sums)
        assert across * cols >= layout.width > (across - 1) * cols
        assert down * rows * steps >= layout.height > (down - 1) * rows * steps
        assert rows * cols * itemsize == 8192
        assert steps == 1 or (sums and layout.per_column)
        assert (rows == 1) == (layout.height == 1 and not layout.per_column)


def test_a_refusal_is_a_sentence() -> None:
    sentence = "no kernel for x of shape (4, 3) and strides (6, 2) with a scale of shape (); ask applies() first"
    with pytest.raises(ValueError) as caught:
        fake_quantizer.quantize(torch.ones(4, 6)[:, ::2], torch.tensor(1.0), None, -8, 7)
    assert str(caught.value) == sentence


KIND = Kind(torch.device("cpu"), torch.float32, torch.float32, torch.float32, "one")
NOT_USED = "Triton's kernels are not used on cpu (%s): the plain formula is, slower"


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which the kernels seem to run, and are the plain formulas."""
    monkeypatch.setattr(fake_quantizer, "_refused", set())
    monkeypatch.setattr(fake_quantizer, "may_run_on", lambda device: True)
    monkeypatch.setattr(fake_quantizer, "kernels", object)
    monkeypatch.setattr(fake_quantizer, "_is_right", fake_quantizer._is_right.__wrapped__)
    monkeypatch.setattr(fake_quantizer, "quantize", plain_quantize)
    monkeypatch.setattr(fake_quantizer, "gradients", plain_gradients)
    return monkeypatch


def fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")


def half_of_it(*arguments: Any) -> Any:
    found = plain_gradients(*arguments)
    return found[0], found[1] / 2, found[2]


@pytest.mark.parametrize("places", ["one", "rows", "columns"])
@pytest.mark.parametrize("zero_dtype", [None, torch.float32, torch.uint8])
@pytest.mark.parametrize("dtype", fake_quantizer.DTYPES)
def test_kernels_that_are_right_are_used(
    faked: Any, dtype: torch.dtype, zero_dtype: torch.dtype | None, places: str
) -> None:
    assert fake_quantizer.runs(Kind(torch.device("cpu"), dtype, torch.float32, zero_dtype, places))


@pytest.mark.parametrize(
    ("name", "kernel", "reason"),
    [
        ("quantize", fail, "RuntimeError: Failed to find C compiler."),
        ("gradients", fail, "RuntimeError: Failed to find C compiler."),
        ("quantize", lambda x, *grid: plain_quantize(x, *grid).add_(1e-4), "its values are wrong"),
        ("quantize", lambda x, *grid: plain_quantize(x.nan_to_num(), *grid), "its values are wrong"),
        ("gradients", half_of_it, "its gradients are wrong"),
        ("gradients", lambda *given: (*plain_gradients(*given)[:2], None), "its gradients are wrong"),
    ],
)
def test_kernels_that_fail_or_are_wrong_are_not_used_and_named(
    faked: pytest.MonkeyPatch, name: str, kernel: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    faked.setattr(fake_quantizer, name, kernel)
    assert not fake_quantizer.runs(KIND) and not fake_quantizer.runs(KIND._replace(dtype=torch.bfloat16))
    assert not fake_quantizer.applies(torch.ones(3), torch.ones(()))
    assert caplog.messages == [NOT_USED % reason]


@pytest.mark.parametrize("name", ["quantize", "gradients"])
def test_a_kernel_that_fails_in_the_middle_of_training_is_replaced(
    faked: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"quantize": plain_quantize, "gradients": plain_gradients}
    guarded = fake_quantizer._or_plainly(fail, plain[name])
    faked.setattr(fake_quantizer.TritonKernels, name, staticmethod(guarded))
    case = next(case for case in CASES if case.affine and case.dtype is torch.float32 and case.scale)
    x, scale, zero_point, grad = inputs(case)
    given = (x, scale, zero_point, *case.bounds)
    found = guarded(*given) if name == "quantize" else guarded(grad, *given)
    y = lsq_plus_quantize(x.requires_grad_(), scale.requires_grad_(), zero_point.requires_grad_(), *case.bounds)
    expected = (y,) if name == "quantize" else torch.autograd.grad(y, (x, scale, zero_point), grad)
    for one, other in zip((found,) if name == "quantize" else found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-4)
    assert caplog.messages == [NOT_USED % "RuntimeError: Failed to find C compiler."]


@with_triton
def test_interpreted_kernels_pass_their_trial(interpreted: Any) -> None:
    assert interpreted["trials"] == {}


def test_triton_is_neither_loaded_without_a_gpu_nor_needed() -> None:
    code = (
        "import sys, torch, qat, qat.kernels.triton.fake_quantizer as face; "
        "print(face.applies(torch.ones(2), torch.ones(())), 'triton' in sys.modules); "
        "sys.modules['triton'] = None; print(face.kernels())"
    )
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=variables)
    assert shown.stdout.split() == ["False", "False", "None"], shown.stderr


@with_triton
@with_cuda
@pytest.mark.parametrize("case", CASES, ids=names)
def test_kernels_on_a_gpu(case: Case) -> None:
    found = computed(case, "cuda")
    on_cpu = {key: value.cpu() for key, value in found.items() if isinstance(value, Tensor)}
    gradients = [None if gradient is None else gradient.cpu() for gradient in found["gradients"]]
    check(case, {**on_cpu, "gradients": gradients}, "cuda")


@with_triton
@with_cuda
def test_on_a_gpu_nothing_waits_and_every_run_gives_the_same_bits() -> None:
    x, grad = torch.randn(64, 32, 56, 56, device="cuda"), torch.randn(64, 32, 56, 56, device="cuda")
    scale, zero_point = torch.tensor(0.02, device="cuda"), torch.tensor(100.0, device="cuda")
    first = fake_quantizer.gradients(grad, x, scale, zero_point, 0, 255)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fake_quantizer.quantize(x, scale, zero_point, 0, 255)
        runs = [fake_quantizer.gradients(grad, x, scale, zero_point, 0, 255) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        assert all(torch.equal(one, other) for one, other in zip(first, run, strict=True))
