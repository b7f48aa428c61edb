"""Chains in Triton: by its interpreter against float64 and the plain graph; and built for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

NUMBERS = {"count", "eps", "share", "low", "high", "floor", "ceiling", "factor"}
TENSORS = {"y", "a", "b", "grad"}
"""Of the step's dtype; the other pointers are float32."""

KERNELS = {
    "_statistics": {}, "_norm_quantize": {}, "_norm_sums": {}, "_norm_gradient": {}, "_settle_sums": {"follows": True},
    "_sum_gradient": {"joins": True, "writes": True, "whole": True, "relative": True}, "_sum_quantize": {"joins": True},
    "_settle": {"follows": True, "moves": True}, "_scale_gradient": {"relative": True},
}  # fmt: skip

BY_LAYOUT = ("_statistics", "_norm_quantize", "_norm_sums", "_norm_gradient", "_settle")


def test_values_gradients_and_training_are_those_of_the_formulas() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_chains"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 82


def test_a_step_launches_few_kernels_and_never_waits() -> None:
    """Seen without a device; docs/measurements.md has larger models."""
    from benchmarks.gpu_count import count_of

    train = count_of("resnet18", 64, 64)["train"]
    assert [each["waits"] for each in train.values()] == [0, 0, 0]
    assert train["kernels"]["kernels"] <= 1.75 * train["float"]["kernels"]
    assert train["kernels"]["gigabytes"] <= 1.2 * train["float"]["gigabytes"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("name", "last"), [*((each, True) for each in KERNELS), *((each, False) for each in BY_LAYOUT)]
)
def test_they_are_built_for_a_card_with_wide_accesses(name: str, last: bool, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat.kernels.triton import chains, quantizers

    kernel = getattr(quantizers if hasattr(quantizers, name) else chains, name)
    shape = chains.Shape.of(*((100352, 256, 1) if last else (32, 256, 3136)))
    small = name[:7] in ("_settle", "_scale_")  # a number a channel
    tiles = {"height": shape.height, "breadth": chains.FEW if small else shape.breadth, "chunk": chains.CHUNK}
    constants: dict[str, Any] = {"affine": True, "last": last, **tiles, "block": chains.TILE, **KERNELS[name]}
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    pointer = {
        each: "*bf16" if each in TENSORS or (each == "out" and not small) else "*fp32" for each in kernel.arg_names
    }
    whole = {"rows", "width", "channels", "turns", "across", "blocks", "parts"}
    signature = {
        each: "constexpr" if each in constants else "fp32" if each in NUMBERS else "i32" if each in whole else kind
        for each, kind in pointer.items()
    }
    wide = {each for each, kind in signature.items() if kind.startswith("*") or each in ("rows", "width", "channels")}
    divisible = {(place,): [["tt.divisibility", 16]] for place, each in enumerate(kernel.arg_names) if each in wide}
    source = ASTSource(kernel, signature, constants, divisible)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chains.OPTIONS)
    assert small or "ld.global.v4.b32" in made.asm["ptx"]
    assert small or ("st.global.v4.b32" in made.asm["ptx"]) == ("out" in signature)
    assert ".local" not in made.asm["ptx"]  # nothing is spilled
