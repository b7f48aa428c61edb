"""The two operations between integers and real numbers, as torch computes them; a file format overrides both."""

import torch
from torch import Tensor


class Operations:
    """How frozen modules quantize and dequantize: here with torch's arithmetic.

    A file format derives from this class and answers with its own operators, so that tracing a frozen model records
    them.
    """

    float_biases = False
    """Whether biases are stored as the floats that they stand for."""

    def quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[Tensor, Tensor] | None, quantizer: str
    ) -> Tensor:
        """clamp(round(x / scale) + zero_point, *bounds) in the integer type of zero_point.

        Args:
            x: any shape.
            scale: shape (), > 0.
            zero_point: shape (), an integer within the bounds; its dtype is that of the result.
            bounds: lowest and highest integer, of the same dtype; None for those of the dtype.
            quantizer: the name of the call in the model, which a file keeps.
        """
        limits = torch.iinfo(zero_point.dtype)
        low, high = (limits.min, limits.max) if bounds is None else map(int, bounds)
        return ((x / scale).round() + zero_point).clamp(low, high).to(zero_point.dtype)

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
    ) -> Tensor:
        """(codes - zero_point) * scale.

        Args:
            codes: integers in any shape.
            scale: shape (), or one along `axis`.
            zero_point: in the shape of scale and the type of codes; None for 0.
            axis: of codes, where there are several scales; None for one scale.
            layer: the name of the layer whose weight this is, which a file keeps.
        """
        trailing = [] if axis is None else [-1, *[1] * (codes.dim() - 1 - axis)]
        shifted = codes.float() if zero_point is None else codes.float() - zero_point.float().reshape(trailing)
        return shifted * scale.reshape(trailing)
