"""`freeze`: modules with integers in place of quantizers and quantized layers."""

from typing import Any

import torch
from torch import fx, nn

from qat.graph.in_place import drop_unread
from qat.graph.nodes import constant_values, submodule_of
from qat.integers.evaluation import call_names, joined
from qat.integers.frozen import (
    FreezingError,
    FrozenLayer,
    FrozenParameter,
    FrozenQuantizer,
    FrozenTable,
    IntegerGrid,
    Operations,
)
from qat.layers import IntegerWeight, QuantEmbedding, QuantFunction, QuantLayer
from qat.layers.twins import CompositeTwin
from qat.quantizer import Quantizer
from qat.torch_internals import children_of


def freeze(model: nn.Module, operations: Operations, *, weights_alone: bool = False) -> nn.Module:
    """Replace every quantizer and quantized layer of a model by its integers.

    In a traced model the calls are rewritten, since a layer's integers depend on the grid that its call is handed. In
    any other module, quantized layers with an input quantizer of their own are replaced in place.

    Args:
        model: from `evaluation_copy`; it is changed.
        operations: how the frozen modules compute.
        weights_alone: freeze the weights of layers without an input quantizer too, which then cannot compute.

    Raises:
        FreezingError: if a layer has no input quantizer, or integers that do not fit int8.
    """
    return _Freezer(operations, weights_alone).module(model, "")


def frozen_grids(frozen: nn.Module) -> dict[str, IntegerGrid]:
    """Return the grid of every quantizer that runs in a frozen model, by its name."""
    running = [""]  # which every name starts with
    if isinstance(frozen, fx.GraphModule):
        running = [f"{node.target}." for node in frozen.graph.nodes if node.op == "call_module"]
    return {
        module.quantizer_name: module.grid()
        for name, module in frozen.named_modules()
        if isinstance(module, FrozenQuantizer) and f"{name}.".startswith(tuple(running))
    }


class _Freezer:
    # It makes frozen modules that all compute with the same operations.
    def __init__(self, operations: Operations, weights_alone: bool) -> None:
        self.operations, self.weights_alone = operations, weights_alone

    def module(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, fx.GraphModule):
            return self.graph(module, path)
        if isinstance(module, Quantizer):
            return FrozenQuantizer(module, path, self.operations)
        if isinstance(module, QuantEmbedding):
            return self.table(module)
        if isinstance(module, QuantLayer):
            return self.layer(module, path, {})
        inner = module.inner_weights() if isinstance(module, CompositeTwin) else {}
        for key, child in list(module.named_children()):
            name = joined(path, key)
            made = self.layer(child, name, inner) if isinstance(child, QuantFunction) else self.module(child, name)
            if made is not child:
                children_of(module)[key] = made
        return module

    def table(self, table: QuantEmbedding) -> nn.Module:
        rows = FrozenTable(table.integers(), self.operations)
        table.add_module("rows", rows)
        object.__setattr__(table, "look_up", rows.forward)  # past torch, which would ask what it is
        return table

    def layer(self, layer: QuantLayer, path: str, inner: dict[str, Any]) -> FrozenLayer:
        # It quantizes its own input. `inner`: weight and bias of the products of a composite layer, by name.
        quantizer = layer.input_quantizer
        weight, bias = inner.get(path.rpartition(".")[2], (None, None))
        if quantizer is None and self.weights_alone:
            weight = layer.weight if weight is None else weight
            return FrozenLayer(layer, path, layer.folded(torch.ones(()), None, weight, None), None, self.operations)
        if quantizer is None:
            raise _no_grid(path, layer)
        integers = layer.integers(quantizer, None, weight, bias)
        grid = FrozenQuantizer(quantizer, joined(path, "input_quantizer"), self.operations)
        return FrozenLayer(layer, path, integers, quantizer, self.operations, grid)

    def graph(self, model: fx.GraphModule, path: str) -> fx.GraphModule:
        values = constant_values(model)
        names = call_names(model)
        replacements: dict[str, nn.Module] = {}
        for number, node in enumerate(list(model.graph.nodes)):
            module = submodule_of(model, node)
            name = names.get(node, str(node.target))
            full = joined(path, name)
            if isinstance(module, Quantizer):
                if node.args[0] in values:
                    constant = FrozenParameter(module, full, values[node.args[0]], self.operations)
                    replace_call(model, node, f"constant_{number}", constant, ())
                elif name != node.target:  # a further call: a format may merge equal ones, so each has its name
                    frozen = FrozenQuantizer(module, full, self.operations)
                    replace_call(model, node, f"call_{number}", frozen, node.args)
                else:
                    replacements[str(node.target)] = FrozenQuantizer(module, full, self.operations)
            elif isinstance(module, QuantEmbedding):
                replacements[str(node.target)] = self.table(module)
            elif isinstance(module, QuantLayer):
                # One module for each call: a shared layer has other integers on another grid.
                grid = argument_of(node, "input_quantizer", values)
                if grid is None:
                    raise _no_grid(full, module)
                layer = FrozenLayer(module, full, integers_of(node, module, values), grid, self.operations)
                replace_call(model, node, f"integer_{number}", layer, node.args[:1])
            elif module is not None:
                replacements[str(node.target)] = self.module(module, full)
        for name, module in replacements.items():
            model.set_submodule(name, module)
        drop_unread(model.graph, model)
        model.recompile()
        return model


def _no_grid(path: str, layer: QuantLayer) -> FreezingError:
    return FreezingError(
        f"{path or 'the model'!r} ({type(layer).__name__}) has no grid for its input; prepare the whole model with"
        " qat.prepare, or give the layer an activation_spec"
    )


def replace_call(
    model: fx.GraphModule, node: fx.Node, name: str, module: nn.Module, args: tuple[fx.node.Argument, ...]
) -> None:
    """Make a node the call of a new module with these arguments."""
    model.add_submodule(name, module)
    options = {key: value for key, value in node.kwargs.items() if key == "output_size" and node.op == "call_module"}
    node.op, node.target, node.args, node.kwargs = "call_module", name, args, options


def argument_of(node: fx.Node, key: str, values: dict[fx.Node, Any]) -> Any:
    """Return the module or value that a call is handed as a keyword argument, or None."""
    source = node.kwargs.get(key)
    return values[source] if isinstance(source, fx.Node) else source


def integers_of(node: fx.Node, layer: QuantLayer, values: dict[fx.Node, Any]) -> IntegerWeight:
    """Return the integers of a layer for one call, with all that the call is handed."""
    weight: Any = None
    bias: Any = argument_of(node, "bias", values)
    if isinstance(layer, QuantFunction):
        operands = [values[operand] if isinstance(operand, fx.Node) else operand for operand in node.args[1:]]
        weight, bias = operands[0], operands[1] if len(operands) > 1 else None
    return layer.integers(argument_of(node, "input_quantizer", values), argument_of(node, "norm", values), weight, bias)
