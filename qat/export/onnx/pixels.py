"""A file that takes pixels: uint8 images (N, H, W, 3), which it normalises itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qat.export.onnx.graph import unused_name

PIXELS = "pixels"
"""The new input's name."""


def take_pixels(proto: Any, normalization: tuple[Sequence[float], Sequence[float]]) -> None:
    """Put (pixel - 255 * mean) / (255 * std) and the change of layout in front of a model of one image input.

    mean and std are those of pixels in [0, 1]. It computes in float32 and in the order in which `train.py` normalises
    images, so that every integer behind it is the same.
    """
    from onnx import TensorProto, helper, numpy_helper

    try:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(normalization, np.float64).astype(np.float32) * np.float32(255)
    except (TypeError, ValueError):  # other lengths, or no numbers
        values = np.zeros(0)
    if values.shape != (2, 3) or not np.isfinite(values).all() or not values[1].min() > 0:
        raise ValueError(
            "export_onnx: normalization must be (mean, std), each of 3 finite numbers, std above 0; got"
            f" {normalization!r}"
        )
    (first, *others), graph = proto.graph.input, proto.graph
    axes = list(first.type.tensor_type.shape.dim)
    if others or len(axes) != 4 or axes[1].dim_value != 3:
        raise ValueError(
            f"export_onnx: normalization is for one input of images (N, 3, H, W), the file has"
            f" {', '.join(end.name for end in graph.input)}"
        )
    pixels, as_floats, centred, scaled, normalized, mean_name, std_name = (
        unused_name(graph, name)
        for name in (PIXELS, "pixels_float", "pixels_centred", "pixels_scaled", "normalized", "pixel_mean", "pixel_std")
    )
    for node in graph.node:
        node.input[:] = [normalized if name == first.name else name for name in node.input]
    sizes = [each.dim_value or each.dim_param for each in axes]
    graph.input[0].CopyFrom(
        helper.make_tensor_value_info(pixels, TensorProto.UINT8, [sizes[0], sizes[2], sizes[3], sizes[1]])
    )
    for name, row in zip((mean_name, std_name), values, strict=True):
        graph.initializer.append(numpy_helper.from_array(row, name))
    steps = [
        helper.make_node("Cast", [pixels], [as_floats], to=TensorProto.FLOAT),
        helper.make_node("Sub", [as_floats, mean_name], [centred]),
        helper.make_node("Div", [centred, std_name], [scaled]),
        helper.make_node("Transpose", [scaled], [normalized], perm=[0, 3, 1, 2]),
    ]
    for step in reversed(steps):
        graph.node.insert(0, step)
