"""What ONNX Runtime needs said twice or otherwise: grids behind operations that do not carry them, global averages."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.export.onnx.operators import written_offset
from qat.preparation.operations import SPLITTING_FUNCTIONS, SPLITTING_METHODS, passes_grid
from qat.preparation.placement import grid_of
from qat.quantizer import Quantizer
from qat.tracing.nodes import submodule_of

NOT_CARRIED = {
    F.pad, operator.getitem, torch.roll, torch.repeat_interleave, torch.select, torch.narrow,
    "roll", "expand", "repeat", "repeat_interleave", "select", "narrow",
}  # fmt: skip
"""Operations that keep a grid and behind which ONNX Runtime forgets it: it computes in float what reads them next, or
quantizes it anew in blocks of its own."""


def grid_to_restate(node: fx.Node, model: fx.GraphModule) -> fx.Node | None:
    """The quantizer to state again behind an operation that carries its grid through where ONNX Runtime does not.

    That is behind the operations of `NOT_CARRIED`; and with a grid in int8 behind max pooling and reshaping too: there
    ONNX Runtime 1.31 writes a zero point of the wrong type itself and refuses its own graph.
    """
    source = (
        grid_of(node, model)
        if passes_grid(node, model) and node.target not in SPLITTING_FUNCTIONS | SPLITTING_METHODS
        else None
    )
    if source is None:
        return None
    grid = model.get_submodule(str(source.target))
    assert isinstance(grid, Quantizer)
    in_int8 = grid.bounds()[0] < 0 and not written_offset(grid)
    return source if node.target in NOT_CARRIED or in_int8 else None


def restate_grid(node: fx.Node, grid: str) -> None:
    """Quantize a padded tensor again, on its own grid: it changes nothing, and without it ONNX Runtime, which carries
    grids through max pooling and reshaping but not through Pad, computes the next operation in float."""
    with node.graph.inserting_after(node):
        again = node.graph.call_module(grid)
    node.replace_all_uses_with(again)
    again.args = (node,)


def averages_all(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node is adaptive average pooling to one pixel."""
    size: Any = module.output_size if isinstance(module, nn.AdaptiveAvgPool2d) else None
    if node.target is F.adaptive_avg_pool2d:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return size in (1, (1, 1), [1, 1])


def scales_fit(node: fx.Node, model: fx.GraphModule) -> bool:
    """Whether ONNX Runtime's integer average takes these grids: it stops at 256 and above, and below 2^-32."""
    source = grid_of(node.args[0], model) if isinstance(node.args[0], fx.Node) else None
    reader = next((user for user in node.users if isinstance(submodule_of(model, user), Quantizer)), None)
    if source is None or reader is None:
        return True  # without grids on both sides it stays a float operation
    before, after = (model.get_submodule(str(end.target)) for end in (source, reader))
    assert isinstance(before, Quantizer) and isinstance(after, Quantizer)
    # The image size divides the ratio; leaving it out keeps within the upper bound, and 2^16 pixels within the lower.
    ratio = float(before.grid()[0]) / float(after.grid()[0])
    return 2.0**-16 <= ratio < 256
