"""The traced graph as a target has it: activations apart, and not in place."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.graph.in_place import Memory, written_by
from qat.graph.nodes import FACTS, given_by_name, is_call, scope_of, submodule_of
from qat.graph.operations import DROPOUTS, FLOAT_PRODUCTS, NONLINEAR, calls_where
from qat.preparation.operations import is_relu, operation_of, passes_grid
from qat.preparation.replacements import SPLIT
from qat.quantizer import Quantizer
from qat.recipe import ScopedRecipe
from qat.targets import TargetProfile
from qat.torch_internals import AnyBatchNorm, AnyConvolution

RELU = calls_where(lambda row: row.kind == "clip" and row.homogeneous)
ALPHA_DROPOUTS = calls_where(lambda row: row.kind == "dropout" and not row.homogeneous)


def rewrite_for_target(graph_module: fx.GraphModule, recipe: ScopedRecipe) -> None:
    """Take apart what a target computes in two operators, x * sigmoid(x), and clip before values are moved.

    The sigmoid gets a grid. A target with float arithmetic keeps the function whole for fewer than 8 bits, on which a
    sigmoid is coarse.

    Where the target has no float arithmetic, the operand of every activation needs a grid too: one that is written over
    it, and whose write nothing else sees, becomes one that is not. So does one behind a BatchNorm, which becomes a part
    of a layer: torch lets nobody write over the result of a layer with a backward hook.
    """
    _clip_before_moves(graph_module)
    profile, memory = recipe.profile, Memory(graph_module, graph_module.graph)
    splits = profile.quantizes_outputs or recipe.activation.bits >= 8
    for node in list(graph_module.graph.nodes):
        operation, written = operation_of(node, graph_module, NONLINEAR), written_by(node, graph_module)
        behind_norm = written is not None and isinstance(submodule_of(graph_module, written), AnyBatchNorm)
        behind_norm &= is_relu(node, graph_module)  # a step runs curves that are written over as one
        if written is not None and not memory.is_unseen(node):
            continue
        module: Any = submodule_of(graph_module, node)
        if operation == "silu" and operation in profile.split_operations and splits:
            _split(node, node.args[0] if node.args else node.kwargs["input"])
        elif not behind_norm and (operation is None or not profile.quantizes_outputs):
            continue
        elif getattr(module, "inplace", False):
            module.inplace = not all(memory.is_unseen(each) for each in memory.written if each.target == node.target)
        elif node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}


def fixed_grid(node: fx.Node, graph_module: fx.GraphModule, profile: TargetProfile) -> tuple[float, int] | None:
    """Return scale and zero point that a target's kernels give a result, or None."""
    operation = operation_of(node, graph_module, NONLINEAR)
    return None if operation is None else profile.fixed_grids.get(operation)


def fix(graph_module: fx.GraphModule, name: str, grid: tuple[float, int] | None) -> None:
    """Let a quantizer keep to a grid for good, whatever the data are."""
    quantizer = graph_module.get_submodule(name)
    assert isinstance(quantizer, Quantizer)
    if grid is not None:
        low, high = ((bound - grid[1]) * grid[0] for bound in quantizer.bounds())
        quantizer.set_range(torch.tensor(low), torch.tensor(high))
        quantizer.is_fixed = True
        quantizer.freeze()


def _clip_before_moves(graph_module: fx.GraphModule) -> None:
    # relu(max_pool(conv(x))) is max_pool(relu(conv(x))), where kernels clip as they store and the grid is the clipped.
    for node in list(graph_module.graph.nodes):
        if not is_relu(node, graph_module) or len(node.all_input_nodes) != 1:
            continue
        given = given_by_name(node, ("input", "min", "max"))
        clamps = node.target in ("clamp", "clip", torch.clamp, torch.clip)
        if clamps and given.get("min") == 0 and given.get("max") is None:
            # torch.onnx writes a Max, behind which a layer stays in float
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu, tuple(node.all_input_nodes), {}
        source, (first,) = node.all_input_nodes[0], node.all_input_nodes
        while passes_grid(source, graph_module) and len(source.users) == 1 and _commutes(source, node, graph_module):
            first, source = source, source.args[0]
        linear = isinstance(submodule_of(graph_module, source), AnyConvolution | nn.Linear | AnyBatchNorm)
        if source is first or len(source.users) > 1 or not (linear or source.target in FLOAT_PRODUCTS.functions):
            continue
        node.replace_all_uses_with(last := node.all_input_nodes[0])
        node.replace_input_with(last, source)
        first.replace_input_with(source, node)
        source.append(node)
        node.meta[FACTS] = source.meta[FACTS]


def _commutes(move: fx.Node, clip: fx.Node, graph_module: fx.GraphModule) -> bool:
    # A clip may save its result for the backward; a ReLU keeps 0 and a factor of dropout, which bounds do not.
    if is_call(move, *ALPHA_DROPOUTS, graph_module) or written_by(move, graph_module) is not None:
        return False
    return is_call(clip, *RELU, graph_module) or not is_call(
        move, DROPOUTS.modules, {*DROPOUTS.functions, F.pad}, (), graph_module
    )


def _split(node: fx.Node, x: Any) -> None:
    # The scope gives the quantizers of both their names.
    scope = str(node.target) if node.op == "call_module" else scope_of(node)
    with node.graph.inserting_before(node):
        sigmoid = node.graph.call_function(torch.sigmoid, (x,))
        product = node.graph.call_function(operator.mul, (x, sigmoid))
    for made in (sigmoid, product):
        made.meta = {"nn_module_stack": {"": (scope, nn.Module)}} | ({SPLIT: scope} if node.op == "call_module" else {})
        made.meta |= {key: value for key, value in node.meta.items() if key == FACTS}
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)
