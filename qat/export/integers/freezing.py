"""A prepared model's copy whose quantizers and layers are ONNX operators on frozen integers."""

import copy
import warnings
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.export.onnx.operators import ActivationGrid, ConstantGrid, FrozenTable, GlobalAveragePool, IntegerLayer
from qat.export.onnxruntime.rewriting import averages_all, grid_to_restate, restate_grid, scales_fit
from qat.layers import QuantBilinear, QuantFunction, QuantLayer
from qat.layers.composite import CompositeTwin
from qat.layers.embedding import QuantTable
from qat.preparation.hooks import is_watched
from qat.preparation.prepared_graph import PreparedGraph
from qat.quantizer import Quantizer
from qat.tracing.constants import constant_values, fixed_nodes
from qat.tracing.in_place import drop_unread
from qat.tracing.nodes import submodule_of
from qat.tracing.train_eval import evaluation_only


def to_integer_modules(model: nn.Module) -> nn.Module:
    """A copy, on the CPU and in evaluation mode, that computes as the runtime is to compute.

    In a traced model the calls are rewritten, since a layer's integers depend on the grid that its call is handed. In
    any other module, quantized layers with an input quantizer of their own are replaced where they stand.
    """
    for part in model.modules():
        if isinstance(part, PreparedGraph):
            part._follow_changes()  # what was replaced since it was prepared
    _tell_hooks(model)
    frozen = copy.deepcopy(model).cpu().float().eval()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    return _frozen(frozen, "")


def _tell_hooks(model: nn.Module) -> None:
    """Say whose hooks are not in the file: of what is written as integers, and of what holds it."""
    written = (QuantLayer, Quantizer, PreparedGraph)
    deaf = [name or type(model).__name__ for name, module in model.named_modules()
            if isinstance(module, written) and is_watched(module)]  # fmt: skip
    if deaf:
        warnings.warn(
            f"export_onnx: hooks and patched forwards of {', '.join(deaf[:5])} are not in the file; it computes"
            " what the model does without them",
            stacklevel=4,
        )


def expected_quantizers(frozen: nn.Module) -> dict[str, tuple[float, ...]]:
    """The names of the quantizers that have to be found in the ONNX graph, and their grids."""
    unused: set[str] = set()
    if isinstance(frozen, fx.GraphModule):
        called = {str(node.target) for node in frozen.graph.nodes if node.op == "call_module"}
        unused = {
            name
            for name, module in frozen.named_modules()
            if isinstance(module, ActivationGrid) and not any(name == c or name.startswith(f"{c}.") for c in called)
        }
    return {
        module.quantizer_name: module.numbers()
        for name, module in frozen.named_modules()
        if isinstance(module, ActivationGrid) and name not in unused
    }


def call_names(model: fx.GraphModule, fixed: Container[fx.Node]) -> dict[fx.Node, str]:
    """What every call of a quantizer is called in the file, but for constants' calls: a shared one's are numbered."""
    names: dict[fx.Node, str] = {}
    seen: dict[str, int] = {}
    for node in model.graph.nodes:
        if isinstance(submodule_of(model, node), Quantizer) and node not in fixed:
            name = str(node.target)
            seen[name] = seen.get(name, -1) + 1
            names[node] = f"{name}.{seen[name]}" if seen[name] else name
    return names


def _frozen(module: nn.Module, path: str) -> nn.Module:
    """What stands for a module of the copy, named by its path in the model."""
    if isinstance(module, fx.GraphModule):
        return _frozen_graph(module, path)
    if isinstance(module, Quantizer):
        return ActivationGrid(module, path)
    if isinstance(module, QuantTable):
        return _frozen_table(module)
    if isinstance(module, QuantLayer):
        return _frozen_layer(module, path, {})
    inner = module.inner_weights() if isinstance(module, CompositeTwin) else {}
    for key, child in list(module.named_children()):
        name = f"{path}.{key}" if path else key
        made = _frozen_layer(child, name, inner) if isinstance(child, QuantFunction) else _frozen(child, name)
        if made is not child:
            module._modules[key] = made
    return module


def _frozen_table(table: QuantTable) -> nn.Module:
    """The embedding with its look-up replaced; how it takes rows together stays its own."""
    rows = FrozenTable(table.integers())
    table.add_module("rows", rows)
    object.__setattr__(table, "look_up", rows.forward)
    return table


def _frozen_layer(layer: nn.Module, path: str, inner: dict[str, Any]) -> nn.Module:
    """A layer that quantizes its own input, with that quantizer inside."""
    assert isinstance(layer, QuantLayer)
    grid = layer.input_quantizer
    if grid is None:
        raise ValueError(
            f"export_onnx: {path!r} ({type(layer).__name__}) has no grid for its input; prepare the whole model with"
            " qat.prepare"
        )
    grids = [ActivationGrid(grid, f"{path}.input_quantizer")]
    if isinstance(layer, QuantBilinear):
        other = layer.other_quantizer
        assert other is not None
        grids.append(ActivationGrid(other, f"{path}.other_quantizer"))
        return IntegerLayer(layer, path, layer.integers(grid, other_quantizer=other), grids)
    weight, bias = inner.get(path.rpartition(".")[2], (None, None))
    return IntegerLayer(layer, path, layer.integers(grid, None, weight, bias), grids)


def _frozen_graph(frozen: fx.GraphModule, path: str) -> fx.GraphModule:
    evaluation_only(frozen)
    drop_unread(frozen.graph, frozen)
    _fold(frozen)
    values = constant_values(frozen)
    names = call_names(frozen, fixed_nodes(frozen.graph))
    replacements: dict[str, nn.Module] = {}
    nodes = list(frozen.graph.nodes)
    # Asked of the graph as it is: what is put into it hides the grids from those behind.
    sources = {node: source for node in nodes if (source := grid_to_restate(node, frozen)) is not None}
    restated = {node: (str(source.target), submodule_of(frozen, source)) for node, source in sources.items()}
    averages = {node for node in nodes if averages_all(node, submodule_of(frozen, node)) and scales_fit(node, frozen)}
    for number, node in enumerate(nodes):
        module = submodule_of(frozen, node)
        name = names.get(node, str(node.target))
        full = f"{path}.{name}" if path else name
        if isinstance(module, Quantizer):
            if node.args[0] in values:
                _replace_call(frozen, node, f"constant_{number}", ConstantGrid(module, values[node.args[0]]), ())
            elif name != node.target:  # a further call: the exporter merges what is equal, so each has its name
                _replace_call(frozen, node, f"call_{number}", ActivationGrid(module, full), node.args)
            else:
                replacements[str(node.target)] = ActivationGrid(module, full)
        elif isinstance(module, QuantTable):
            replacements[str(node.target)] = _frozen_table(module)
        elif isinstance(module, QuantLayer):
            # One module a call: a shared layer has other integers on another grid.
            made = IntegerLayer(module, full, _integers(frozen, node, module, values))
            _replace_call(frozen, node, f"integer_{number}", made, node.args[: len(module.quantizer_arguments)])
        elif node in averages:
            _replace_call(frozen, node, f"global_average_pool_{number}", GlobalAveragePool(), node.args[:1])
        elif node in restated:
            again, (name, grid) = f"restated_{number}", restated[node]
            assert isinstance(grid, Quantizer)
            frozen.add_submodule(again, ActivationGrid(grid, f"{path}.{name}.again".lstrip(".")))
            restate_grid(node, again)
        elif module is not None:
            replacements[str(node.target)] = _frozen(module, full)
    for name, module in replacements.items():
        frozen.set_submodule(name, module)
    drop_unread(frozen.graph, frozen)
    frozen.recompile()
    return frozen


@torch.no_grad()
def _fold(frozen: fx.GraphModule) -> None:
    """Store what layers compute from parameters alone: it never changes, and the runtime would compute it otherwise.

    A quantized parameter that a matrix product reads stays: it is stored as integers.
    """
    fixed = fixed_nodes(frozen.graph)
    if not any(node.op == "call_module" and not isinstance(submodule_of(frozen, node), Quantizer) for node in fixed):
        return
    interpreter = fx.Interpreter(frozen, garbage_collect_values=False)
    for number, node in enumerate(list(frozen.graph.nodes)):
        if node not in fixed:
            continue
        interpreter.env[node] = value = interpreter.run_node(node)
        readers = [user for user in node.users if user not in fixed]
        if not readers or not isinstance(value, Tensor) or node.op == "get_attr":
            continue
        if not isinstance(submodule_of(frozen, node), Quantizer):
            frozen.register_buffer(f"folded_{number}", value.detach().clone())
            with frozen.graph.inserting_after(node):
                folded = frozen.graph.get_attr(f"folded_{number}")
            for user in readers:
                user.replace_input_with(node, folded)


def _replace_call(frozen: fx.GraphModule, node: fx.Node, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    frozen.add_submodule(name, module)
    options = {key: value for key, value in node.kwargs.items() if key == "output_size" and node.op == "call_module"}
    node.op, node.target, node.args, node.kwargs = "call_module", name, args, options


def _integers(frozen: fx.GraphModule, node: fx.Node, layer: QuantLayer, values: dict[fx.Node, Any]) -> Any:
    """The integers of a layer as its call has them: on this grid, with this BatchNorm, and what else it is handed."""

    def handed(key: str) -> Any:
        source = node.kwargs.get(key)
        return values[source] if isinstance(source, fx.Node) else source

    if isinstance(layer, QuantBilinear):
        return layer.integers(handed("input_quantizer"), None, None, None, handed("other_quantizer"))
    weight: Any = None
    bias: Any = handed("bias")
    if isinstance(layer, QuantFunction):
        operands = [values[operand] if isinstance(operand, fx.Node) else operand for operand in node.args[1:]]
        weight, bias = operands[0], operands[1] if len(operands) > 1 else None
    return layer.integers(handed("input_quantizer"), handed("norm"), weight, bias)
