"""A file that takes pixels: uint8 images (N, H, W, 3), which it normalises itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np

PIXELS, NORMALIZED = "pixels", "normalized"
"""The new input's name, and what replaces the old input inside."""


def take_pixels(proto: Any, mean: Sequence[float], std: Sequence[float]) -> None:
    """Put (pixel - 255 * mean) / (255 * std) and the change of layout in front of a model of one image input.

    In float32 and in the order in which `train.py` normalises images, so that every integer behind it is the same.

    Args:
        proto: the file.
        mean, std: of red, green and blue, of pixels in [0, 1].

    Raises:
        ValueError: for another number of channels, or if the file's only input is no batch of images with 3 channels.
    """
    from onnx import TensorProto, helper, numpy_helper

    (first, *others), graph = proto.graph.input, proto.graph
    axes = list(first.type.tensor_type.shape.dim)
    if others or len(axes) != 4 or axes[1].dim_value != 3:
        raise ValueError(
            f"export_onnx: normalization is for one input of images (N, 3, H, W), the file has"
            f" {', '.join(end.name for end in graph.input)}"
        )
    if not len(mean) == len(std) == 3 or not min(std) > 0:
        raise ValueError(f"export_onnx: normalization: mean and std need 3 values, std above 0; got {mean} and {std}")
    old = first.name
    for node in graph.node:
        node.input[:] = [NORMALIZED if name == old else name for name in node.input]
    sizes = [each.dim_value or each.dim_param for each in axes]
    graph.input[0].CopyFrom(
        helper.make_tensor_value_info(PIXELS, TensorProto.UINT8, [sizes[0], sizes[2], sizes[3], sizes[1]])
    )
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.float32) * np.float32(255), name))
    steps = [
        helper.make_node("Cast", [PIXELS], ["pixels_float"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["pixels_float", "pixel_mean"], ["pixels_centred"]),
        helper.make_node("Div", ["pixels_centred", "pixel_std"], ["pixels_normalized"]),
        helper.make_node("Transpose", ["pixels_normalized"], [NORMALIZED], perm=[0, 3, 1, 2]),
    ]
    for step in reversed(steps):
        graph.node.insert(0, step)
