"""The structures of the C kernels, and the types of every function's arguments."""

import ctypes
from typing import TypeAlias

from torch import Tensor

POINTER, SIZE, INT, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_double


class Grid(ctypes.Structure):
    """An integer grid: code = clamp(rint(x / step) + zero, low, high)."""

    _fields_ = [("step", FLOAT), ("zero", FLOAT), ("low", FLOAT), ("high", FLOAT)]


GridTensors: TypeAlias = list[Tensor | None]
"""Scale, smallest scale and zero point of a quantizer (None on a symmetric grid)."""


class LearnedGrid(ctypes.Structure):
    """A grid whose step is learned: addresses of tensors, and the fields of `Levels`."""

    _fields_ = [
        ("scale", POINTER), ("smallest", POINTER), ("zero_point", POINTER), ("low", FLOAT), ("high", FLOAT),
        ("shift", FLOAT), ("factor", DOUBLE), ("relative", INT),
    ]  # fmt: skip


class Rows(ctypes.Structure):
    """The symmetric learned grids of a weight's rows; smallest may be NULL."""

    _fields_ = [
        ("scales", POINTER), ("smallest", POINTER), ("low", FLOAT), ("high", FLOAT), ("factor", DOUBLE),
        ("relative", INT),
    ]  # fmt: skip


class Operand(ctypes.Structure):
    """Codes, and the address of their step and zero."""

    _fields_ = [("codes", POINTER), ("qparams", POINTER)]


class Extent(ctypes.Structure):
    """A tensor with channels: `outer` blocks of channels x inner elements."""

    _fields_ = [("outer", SIZE), ("channels", SIZE), ("inner", SIZE)]


class Rescaling(ctypes.Structure):
    """Biases and scales of a layer, one per channel, and the clip behind it."""

    _fields_ = [("bias", POINTER), ("scale", POINTER), ("floor", FLOAT), ("ceiling", FLOAT)]


class Norm(ctypes.Structure):
    """The addresses of a BatchNorm's numbers, one per channel."""

    _fields_ = [(name, POINTER) for name in ("gamma", "beta", "mean", "inverse")]


class Pool(ctypes.Structure):
    """A max pool."""

    _fields_ = [
        (name, SIZE)
        for name in (
            "n", "channels", "height", "width", "out_height", "out_width", "kernel_h", "kernel_w", "stride_h",
            "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
        )
    ]  # fmt: skip


SIGNATURES: dict[str, tuple[type, ...]] = {
    "fake_quantize": (POINTER, POINTER, SIZE, Grid, INT),
    "fake_quantize_backward": (POINTER, POINTER, POINTER, SIZE, Grid, POINTER, INT),
    "squared_error": (POINTER, SIZE, Grid, INT),
    "all_finite": (POINTER, POINTER, SIZE),
    "quantize_codes": (POINTER, POINTER, SIZE, LearnedGrid, POINTER, INT),
    "quantize_codes_backward": (POINTER, POINTER, POINTER, SIZE, LearnedGrid, POINTER, INT),
    "dequantize": (POINTER, POINTER, SIZE, POINTER, INT),
    "step_slopes": (POINTER, POINTER, SIZE, LearnedGrid, INT),
    "gradient_by_slopes": (POINTER, POINTER, SIZE, LearnedGrid, POINTER, INT),
    "quantize_rows": (POINTER, Rows, POINTER, POINTER, POINTER, SIZE, SIZE, INT),
    "quantize_rows_backward": (POINTER, POINTER, Rows, POINTER, POINTER, SIZE, SIZE, INT),
    "add_quantize": (Operand, Operand, POINTER, SIZE, LearnedGrid, FLOAT, FLOAT, POINTER, INT),
    "add_quantize_backward": (POINTER, Operand, Operand, POINTER, SIZE, LearnedGrid, FLOAT, FLOAT, POINTER, INT),
    "statistics": (POINTER, Extent, DOUBLE, POINTER, POINTER, POINTER, POINTER, POINTER, DOUBLE, INT),
    "norm_quantize": (POINTER, POINTER, Extent, Norm, LearnedGrid, FLOAT, FLOAT, POINTER, INT),
    "norm_quantize_backward": (
        POINTER, POINTER, POINTER, Extent, Norm, LearnedGrid, FLOAT, FLOAT, INT, POINTER, POINTER, POINTER, INT,
    ),
    "max_pool": (POINTER, POINTER, POINTER, Pool, INT, INT),
    "max_pool_backward": (POINTER, POINTER, POINTER, Pool, INT, INT),
    "curve_quantize": (POINTER, POINTER, SIZE, LearnedGrid, INT, POINTER, INT),
    "curve_quantize_backward": (POINTER, POINTER, POINTER, SIZE, LearnedGrid, INT, POINTER, INT),
    "softmax_quantize": (POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT, LearnedGrid, POINTER, INT),
    "softmax_quantize_backward": (POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT, LearnedGrid, POINTER, INT),
    "requantize": (POINTER, POINTER, POINTER, POINTER, Extent, Rescaling, Grid, INT),
    "look_up": (POINTER, POINTER, SIZE, POINTER, INT),
    "gate": (POINTER, POINTER, POINTER, SIZE, Extent, Grid, Grid, INT),
}  # fmt: skip
"""Argument types by function; a function returns nothing unless `RESULTS` says so."""

RESULTS: dict[str, type] = {"squared_error": DOUBLE, "all_finite": INT}


def declare(library: ctypes.CDLL) -> None:
    """Declare the functions to ctypes, which otherwise takes each number as an int."""
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, RESULTS.get(name)
