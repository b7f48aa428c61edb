"""The cases of test_kernels_triton.py; and, as a script, the child process that computes them.

Triton's interpreter is chosen when triton is imported, for a whole process. So a child with TRITON_INTERPRET=1 computes
every case, another one compiles the kernels for a GPU, and the tests look at what they bring.
"""

import importlib
import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.kernels.triton import fake_quantizer
from qat.kernels.triton.trial import Kind, difference


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    scale: tuple[int, ...] = ()
    affine: bool = False
    dtype: torch.dtype = torch.float32
    bounds: tuple[int, int] = (-8, 7)
    order: tuple[int, ...] | None = None  # axes from the outermost in memory to the innermost
    split: int | None = None  # group size: axis 1 of what lies in memory becomes two
    index_limit: int = 2**31


LAST = (0, 2, 3, 1)  # channels_last
CASES = [
    Case("tensor", (2, 3, 9, 7)),
    Case("tensor, several programs", (5, 1031)),
    Case("tensor, affine", (2, 3, 9, 7), (), True, bounds=(0, 255)),
    Case("tensor, scale of one element", (7, 5), (1,), True, bounds=(0, 15)),
    Case("tensor, channels_last", (2, 5, 4, 3), order=LAST),
    Case("tensor, any order", (4, 3, 2, 5), (1, 1, 1, 1), True, order=(2, 0, 3, 1)),
    Case("one element", (1,)),
    Case("no axes", (), (), True),
    Case("no elements", (0, 3), (1, 3), True),
    Case("float16", (4, 700), (), True, torch.float16),
    Case("bfloat16", (4, 1100), (), True, torch.bfloat16),
    Case("bfloat16 per channel", (33, 40), (33, 1), dtype=torch.bfloat16),
    Case("float16 per channel", (17, 3, 5, 5), (17, 1, 1, 1), dtype=torch.float16),
    Case("linear", (37, 50), (37, 1)),
    Case("linear, rows of several tiles", (3, 2100), (3, 1), True),
    Case("linear, transposed in memory", (37, 50), (37, 1), order=(1, 0)),
    Case("conv1d", (40, 3, 5), (40, 1, 1)),
    Case("conv2d", (40, 6, 3, 3), (40, 1, 1, 1), bounds=(-127, 127)),
    Case("conv2d, channels_last", (40, 6, 3, 3), (40, 1, 1, 1), True, order=LAST),
    Case("conv3d", (9, 4, 3, 3, 3), (9, 1, 1, 1, 1)),
    Case("depthwise", (130, 1, 3, 3), (130, 1, 1, 1)),
    Case("one channel", (1, 6, 3, 3), (1, 1, 1, 1)),
    Case("axis 1", (6, 10, 3, 3), (10, 1, 1), True),
    Case("axis 1, channels_last", (6, 10, 8, 16), (1, 10, 1, 1), True, order=LAST),
    Case("columns, many", (150, 70), (70,), True),
    Case("group", (6, 12, 3, 3), (6, 3, 1, 1, 1), True, split=4),
    Case("group of a linear", (20, 96), (20, 3, 1), bounds=(-2, 1), split=32),
    Case("group, channels_last", (6, 12, 3, 3), (6, 3, 1, 1, 1), order=LAST, split=4),
    Case("a scale for each", (3, 5), (3, 5), True),
    Case("long offsets", (40, 6, 3, 3), (40, 1, 1, 1), True, index_limit=0),
    Case("long offsets, columns", (300, 20), (20,), index_limit=0),
    Case("large grid", (500,), bounds=(-(2**23), 2**23)),
    Case("large affine grid", (500,), (), True, bounds=(0, 2**22 + 5)),
]
names = [case.name for case in CASES]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x over the grid and beyond, with ties and bounds hit exactly; scale; zero point; gradient."""
    torch.manual_seed(names.index(case.name))
    order = case.order or tuple(range(len(case.shape)))
    x = torch.empty([case.shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])
    if case.split is not None:
        x = x.view(x.shape[0], -1, case.split, *x.shape[2:])
    low, high = case.bounds
    scale = torch.rand(case.scale) * 0.1 + 0.05
    scale = torch.where(torch.rand(case.scale) < 0.5, 0.0625, scale)  # a power of two has exact ties
    zero_point = torch.randint(low, high + 1, case.scale) + torch.rand(case.scale) - 0.5 if case.affine else None
    shift = 0 if zero_point is None else zero_point.round()
    levels = torch.empty_like(x).uniform_(low - 0.2 * (high - low), high + 0.2 * (high - low)) - shift
    halves = torch.rand(x.shape) < 0.5
    x.copy_(torch.where(halves, (levels * 2).round() / 2, levels) * scale)
    return x.to(case.dtype), scale, zero_point, torch.empty_like(x).normal_().to(case.dtype)


def computed(case: Case, device: str = "cpu") -> dict[str, Any]:
    """What the kernels make of a case."""
    x, scale, zero_point, grad = (None if tensor is None else tensor.to(device) for tensor in inputs(case))
    assert fake_quantizer.applies(x, scale, zero_point), case.name
    limit, fake_quantizer.INDEX_LIMIT = fake_quantizer.INDEX_LIMIT, case.index_limit
    low, high = case.bounds
    found = {
        "y": fake_quantizer.quantize(x, scale, zero_point, low, high),
        "gradients": fake_quantizer.gradients(grad, x, scale, zero_point, low, high),
    }
    fake_quantizer.INDEX_LIMIT = limit
    return found


INF, NAN = math.inf, math.nan
EDGES = [  # x, then its level on a grid of step 1 from -4 to 3, then whether its gradient passes
    (NAN, NAN, False), (INF, 3, False), (-INF, -4, False), (3.0, 3, True), (3.0000002, 3, False), (-4.0, -4, True),
    (-4.0000005, -4, False), (0.5, 0, True), (1.5, 2, True), (2.5, 2, True), (-0.5, 0, True), (-1.5, -2, True),
    (-2.5, -2, True), (-3.5, -4, True), (0.49999997, 0, True), (0.50000006, 1, True), (4e6 + 0.5, 3, False),
    (1e30, 3, False), (-1e30, -4, False), (1e-40, 0, True), (0.0, 0, True),
]  # fmt: skip


def edges() -> dict[str, Any]:
    """What the kernels make of single values, of unusual gradients, and of tensors that are not theirs."""
    x, one = torch.tensor([edge[0] for edge in EDGES]), torch.tensor(1.0)
    found: dict[str, Any] = {"y": fake_quantizer.quantize(x, one, None, -4, 3), "grad": torch.ones(len(EDGES))}
    found["gradients"] = fake_quantizer.gradients(found["grad"], x, one, None, -4, 3)
    found["affine"] = fake_quantizer.quantize(x, one, torch.tensor(2.4), -2, 5)  # the same levels
    found["bad grid"] = [
        fake_quantizer.quantize(one, torch.tensor(step), None, -4, 3) for step in (0.0, -1.0, NAN, INF)
    ]
    found["bad zero point"] = [
        fake_quantizer.quantize(one, one, torch.tensor(zero), -4, 3) for zero in (NAN, INF, -INF, 99.0)
    ]
    x, scale, zero_point, grad = inputs(CASES[names.index("conv2d, channels_last")])
    leaves = [tensor.requires_grad_() for tensor in (x, scale, zero_point)]
    found["order"] = [fake_quantizer.gradients(g, *leaves, -8, 7) for g in (grad, grad.contiguous())]
    ones = torch.ones(())
    found["expanded"] = [fake_quantizer.gradients(g, *leaves, -8, 7) for g in (ones.expand_as(x), torch.ones_like(x))]
    needs = list(itertools.product((True, False), repeat=3))
    found["needs"] = [(need, fake_quantizer.gradients(grad, *leaves, -8, 7, need)) for need in needs]
    expanded = [tensor.detach()[:1].expand(40, 1, 1, 1) for tensor in leaves[1:]]
    found["expanded scale"] = [
        fake_quantizer.quantize(x, *grid, -8, 7) for grid in (expanded, [g.clone() for g in expanded])
    ]
    found["types"] = [fake_quantizer.quantize(x, scale.to(t), zero_point.round().to(u), -8, 7) for t, u in TYPES]
    found["applies"] = [fake_quantizer.applies(*tensors) for tensors, _ in offered()]
    return found


TYPES = [(torch.float32, torch.float32), (torch.float64, torch.int32), (torch.float32, torch.int8)]


def offered() -> list[tuple[tuple[Tensor, ...], bool]]:
    """Tensors, and whether the kernels take them."""
    x, one = torch.ones(4, 6, 3, 3), torch.tensor(1.0)
    rows, zeros = torch.ones(4, 1, 1, 1), torch.zeros(4, 1, 1, 1)
    return [
        ((x, one), True), ((x, rows, zeros), True), ((torch.nn.Parameter(x), rows), True), ((x[:2], one), True),
        ((x.double(), one), False), ((x.int(), one), False), ((x, one.int()), False), ((x[:, ::2], one), False),
        ((one.expand(4, 6), one), False), ((x, torch.ones(5, 1, 1, 1)), False), ((x, rows, one), False),
        ((one, torch.ones(1)), False), ((x, rows.to("meta")), False), ((x.to("meta"), rows.to("meta")), False),
        ((x, one, torch.tensor(True)), False), ((torch.empty(0, 3), torch.ones(5)), False),
        ((x.as_subclass(type("Named", (Tensor,), {})), one), False),
    ]  # fmt: skip


def trials() -> dict[Kind, str]:
    """What the kernels fail in, of all kinds."""
    dtypes, zeros, places = fake_quantizer.DTYPES, (None, torch.float32, torch.int8), ("one", "rows", "columns")
    kinds = [
        Kind(torch.device("cpu"), dtype, torch.float32, zero, place)
        for dtype, zero, place in itertools.product(dtypes, zeros, places)
    ]
    found = {kind: difference(kind, fake_quantizer.quantize, fake_quantizer.gradients) for kind in kinds}
    return {kind: wrong for kind, wrong in found.items() if wrong is not None}


def compiled_ptx() -> dict[str, str]:
    """The kernels compiled for an H200, which needs no GPU: PTX by name."""
    compile_for = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    from qat.kernels.triton import kernels

    def ptx(name: str, pointers: dict[str, str | None], constants: dict[str, Any]) -> str:
        kernel = getattr(kernels, name)
        constants = {**constants, **{name: None for name, kind in pointers.items() if kind is None}}
        numbers = {"qmin": "fp32", "qmax": "fp32"}
        signature = {a: "constexpr" if a in constants else (pointers | numbers).get(a, "i32") for a in kernel.arg_names}
        aligned = (*pointers, "width", "height")
        attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a in aligned}
        source = compile_for.ASTSource(kernel, signature, constants, attributes)
        options = {"num_warps": fake_quantizer.WARPS, "enable_fp_fusion": False}
        return str(compile_for.compile(source, target=target, options=options).asm["ptx"])

    found = {}
    shapes = {"tensor": (1, 0, 1), "rows": (2, 0, 1), "columns": (32, 1, 4)}
    for name, kind in (("tensor", "fp32"), ("tensor", "bf16"), ("rows", "fp32"), ("columns", "bf16")):
        rows, per_column, steps = shapes[name]
        tile = {"ROWS": rows, "COLS": (4096 if kind == "bf16" else 2048) // rows, "PER_COLUMN": bool(per_column)}
        constants = {**tile, "LARGE": False, "LONG": per_column == 1}
        if name == "tensor":
            constants |= {"height": 1, "cycle": 1, "channels": 1}
        f32, own = "*fp32", f"*{kind}"
        grid = {"x": own, "scale": f32, "zero_point": f32 if kind == "bf16" else None}
        sums = {"grad": own, "grad_x": own, "scale_sums": f32, "zero_sums": grid["zero_point"]}
        found[f"quantize {name} {kind}"] = ptx("quantize_tiles", {**grid, "y": own}, constants)
        found[f"gradient {name} {kind}"] = ptx("gradient_tiles", {**grid, **sums}, {**constants, "STEPS": steps})
    large = {"ROWS": 1, "COLS": 2048, "PER_COLUMN": False, "LARGE": True, "LONG": False}
    found["large"] = ptx("quantize_tiles", {"x": f32, "y": f32, "scale": f32, "zero_point": f32}, large)
    return found


if __name__ == "__main__":
    what, answers = sys.argv[1:]
    np.seterr(all="ignore")  # the interpreter computes in NumPy, which warns of infinities
    if what == "interpreted":
        torch.save({**{case.name: computed(case) for case in CASES}, "edges": edges(), "trials": trials()}, answers)
    else:
        torch.save(compiled_ptx(), answers)
