"""Kernels in Triton, by its interpreter on CPU tensors, against the formulas; and built for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qat.kernels import dispatch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

NUMBERS = {"count", "eps", "share", "low", "high", "floor", "ceiling", "factor"}
WHOLE = {"rows", "width", "channels", "turns", "across", "blocks", "parts"}
TENSORS = {"x", "y", "a", "b", "grad"}
"""Of the step's dtype; the other pointers are float32."""

KERNELS: dict[str, dict[str, bool]] = {
    "_quantize": {}, "_gradients": {"writes": True},
    "_statistics": {}, "_norm_quantize": {}, "_norm_sums": {}, "_norm_gradient": {}, "_settle_sums": {"follows": True},
    "_sum_gradient": {"joins": True, "writes": True, "whole": True, "relative": True}, "_sum_quantize": {"joins": True},
    "_settle": {"follows": True, "moves": True}, "_scale_gradient": {"relative": True},
}  # fmt: skip
QUANTIZERS = ("_quantize", "_gradients")
BY_LAYOUT = ("_statistics", "_norm_quantize", "_norm_sums", "_norm_gradient", "_settle")
BUILT = [(name, True, "bf16") for name in KERNELS]
BUILT += [(name, False, "bf16") for name in BY_LAYOUT] + [(name, True, "fp32") for name in QUANTIZERS]


def test_values_gradients_and_training_are_those_of_the_formulas() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["99", "82", "2"]


def test_a_step_launches_few_kernels_and_never_waits() -> None:
    """Seen without a device; docs/measurements.md has larger models."""
    from benchmarks.gpu_count import count_of

    found = count_of("resnet18", 1024, 64)
    train, evaluation = found["train"], found["eval"]
    assert [each["waits"] for each in train.values()] == [0, 0, 0]
    assert train["kernels"]["kernels"] <= 1.75 * train["float"]["kernels"]
    assert train["kernels"]["gigabytes"] <= 1.2 * train["float"]["gigabytes"]
    assert evaluation["kernels"]["waits"] == 0
    assert evaluation["kernels"]["kernels"] <= 1.1 * evaluation["float"]["kernels"]
    assert evaluation["kernels"]["gigabytes"] <= 0.9 * evaluation["float"]["gigabytes"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("name", "last", "dtype"), BUILT)
def test_they_are_built_for_a_card_with_wide_accesses(name: str, last: bool, dtype: str, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat.kernels.triton import chains, quantizers

    kernel = getattr(quantizers if hasattr(quantizers, name) else chains, name)
    shape = chains.Shape.of(*((100352, 256, 1) if last else (32, 256, 3136)))
    small = name[:7] in ("_settle", "_scale_")  # a number a channel
    tiles = {"height": shape.height, "breadth": chains.FEW if small else shape.breadth, "chunk": chains.CHUNK}
    block = quantizers.BLOCK if name in QUANTIZERS else chains.TILE
    constants: dict[str, Any] = {"affine": True, "last": last, **tiles, "block": block, **KERNELS[name]}
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    signature = dict.fromkeys(kernel.arg_names, "*fp32")
    signature |= {each: f"*{dtype}" for each in signature if each in TENSORS or (each == "out" and not small)}
    signature |= {each: "fp32" for each in signature if each in NUMBERS}
    signature |= {each: "i32" for each in signature if each in WHOLE} | dict.fromkeys(constants, "constexpr")
    wide = {each for each, kind in signature.items() if kind.startswith("*") or each in ("rows", "width", "channels")}
    divisible = {(place,): [["tt.divisibility", 16]] for place, each in enumerate(kernel.arg_names) if each in wide}
    source = ASTSource(kernel, signature, constants, divisible)
    options = quantizers.OPTIONS if name in QUANTIZERS else chains.OPTIONS
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    assert small or "ld.global.v4.b32" in ptx
    assert small or ("st.global.v4.b32" in ptx) == ("out" in signature or name == "_quantize")
    assert ".local" not in ptx  # nothing is spilled
    assert name not in QUANTIZERS or (made.metadata.shared <= 64 and made.metadata.num_warps == 4)


@pytest.mark.parametrize("off", [False, True])
def test_where_they_do_not_run_the_formula_does_and_the_log_says_why(off, monkeypatch, caplog):
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


CODES: dict[str, tuple[dict[str, str], dict[str, bool]]] = {
    "_quantize_codes": ({"x": "*fp32", "seen": "*fp32"}, {}),
    "_values": ({"out": "*fp32"}, {}),
    "_requantize": (
        {"sums": "*i32", "shift": "*i32", "bias": "*fp32", "scale": "*fp32"},
        {"shifts": True, "quantizes": True, "looks_up": False},
    ),
    "_join": ({}, {"adds": True, "gates": False}),
    "_look_up": ({}, {}),
}
"""Pointers that are not to bytes, and constants."""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", CODES)
def test_those_of_evaluation_are_built_too(name: str, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat.kernels.triton import codes

    kernel, (pointers, given) = getattr(codes, name), CODES[name]
    constants = {**given, "block": codes.BLOCK}
    bytes_read = [each for each in ("codes", "table", "a", "b", "out") if each in kernel.arg_names]
    whole = [each for each in ("count", "channels", "inner", "period") if each in kernel.arg_names]
    signature = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(bytes_read, "*u8") | pointers
    signature |= dict.fromkeys(whole, "i32") | dict.fromkeys(constants, "constexpr")
    wide = [place for place, each in enumerate(kernel.arg_names) if signature[each][0] == "*" or each in whole]
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in wide})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=codes.OPTIONS).asm["ptx"]
    assert "st.global.v" in ptx and "ld.global.v" in ptx and ".local" not in ptx
