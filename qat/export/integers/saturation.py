"""Whether sums of two products can saturate 16 bits, channel by channel, from the integers alone.

x86 without VNNI multiplies uint8 by int8 with `vpmaddubsw`: it adds two products in 16 bits, which hold -32,768 to
32,767. The largest sum in a channel is the highest code of its input times two weights of one sign.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

HIGHEST, LOWEST = 2**15 - 1, -(2**15)
"""The range of 16 bits."""


@dataclass(frozen=True)
class Saturation:
    """The sums of two products that one layer may reach.

    Attributes:
        layer: its name; for a product of two activations the quantizer of the second.
        sums: for every output channel, the sum of two products that is farthest from 0.
    """

    layer: str
    sums: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels whose sum may leave 16 bits."""
        return tuple(channel for channel, value in enumerate(self.sums) if not LOWEST <= value <= HIGHEST)

    @property
    def largest(self) -> int:
        """The sum farthest from 0 over all channels."""
        return max(self.sums, key=abs, default=0)


def worst_pair(row: Any, code: int) -> int:
    """The sum of two products that is farthest from 0, or the one product if there is one weight.

    Any two weights of a channel count as a pair, not only neighbours: the runtime's packing decides which inputs meet
    in one instruction, and it depends on the kernel. A channel with one weight (a depthwise 1x1 convolution) always
    fits: 255 * 128 = 32,640.

    Args:
        row: the int8 weights of one output channel.
        code: the highest code of the input, 0 to 255.
    """
    ordered = np.sort(row.astype(np.int64))
    above, below = ordered[-2:].clip(min=0).sum(), ordered[:2].clip(max=0).sum()
    return int(code * (above if above >= -below else below))
