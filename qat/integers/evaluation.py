"""Evaluation's graph: no training branches, constant parts computed."""

import copy
from collections import Counter

import torch
from torch import Tensor, fx, nn

from qat.graph.guards import expect_default
from qat.graph.in_place import drop_unread, written_by
from qat.graph.modes import evaluation_only
from qat.graph.nodes import constant_nodes, submodule_of
from qat.inputs import Inputs, bind_inputs
from qat.integers.movement import asks_for_shape, rests
from qat.layers import QuantLayer
from qat.preparation.prepared_graph import PreparedGraph
from qat.quantizer import Quantizer


def evaluation_copy(model: nn.Module, fold_quantizers: bool = False) -> nn.Module:
    """Copy a model to the CPU, in float32, with graphs of what evaluation computes.

    With `fold_quantizers`, quantized parameters become constants too, so that only calls on activations are left.
    """
    for part in model.modules():
        if isinstance(part, PreparedGraph):
            part._follow_changes()  # layers that were replaced after `prepare`
    evaluated = copy.deepcopy(model).cpu().float().eval()
    for parameter in evaluated.parameters():
        parameter.requires_grad_(False)
    for part in evaluated.modules():
        if isinstance(part, fx.GraphModule):
            before = _quantizers(part)
            evaluation_only(part)
            _drop_resting(part)
            drop_unread(part.graph, part)
            for name in before - _quantizers(part):  # they may lie in a module that still runs: calls of one SiLU
                part.delete_submodule(name)
            _drop_sized(part)
            _fold(part, fold_quantizers)
            part.recompile()
    return evaluated


def _quantizers(model: fx.GraphModule) -> set[str]:
    named = {name for name, module in model.named_modules() if isinstance(module, Quantizer)}
    return named & {str(node.target) for node in model.graph.nodes}


def drop_defaults(evaluated: nn.Module, example_inputs: Inputs) -> Inputs:
    """Remove arguments that always have one value; return the inputs of a file, which are the others.

    Raises:
        ValueError: if an example has another value for such an argument.
    """
    if not isinstance(evaluated, fx.GraphModule):
        return example_inputs
    bound = bind_inputs("export_onnx", evaluated, example_inputs)
    for node in evaluated.graph.find_nodes(op="placeholder"):
        if node.args and all(user.target is expect_default for user in node.users):
            given = bound.pop(str(node.target), node.args[0])
            for user in list(node.users):
                expect_default(given, *user.args[1:])
                evaluated.graph.erase_node(user)
            evaluated.graph.erase_node(node)
    evaluated.recompile()
    by_position = any(str(node.target).startswith("*") for node in evaluated.graph.find_nodes(op="placeholder"))
    return example_inputs if by_position else bound


def call_names(model: fx.GraphModule) -> dict[fx.Node, str]:
    """Name calls of a graph's activation quantizers; the second of `q` is `q.1`."""
    fixed = constant_nodes(model.graph, layers=True)
    seen: Counter[str] = Counter()
    return {
        node: numbered(str(node.target), seen)
        for node in model.graph.nodes
        if isinstance(submodule_of(model, node), Quantizer) and node not in fixed
    }


def quantizer_calls(model: nn.Module, path: str = "") -> dict[str, list[str]]:
    """Return names of activation quantizers' calls in an `evaluation_copy`, by path.

    How often a quantizer outside a graph is called is not known before a run: it stands for one call.
    """
    if isinstance(model, Quantizer):
        return {path: [path]} if model.role == "activation" else {}
    calls: dict[str, list[str]] = {}
    children = list(model.named_children())  # of a module without a graph, all of them may run
    if isinstance(model, fx.GraphModule):
        for node, name in call_names(model).items():
            calls.setdefault(joined(path, str(node.target)), []).append(joined(path, name))
        called = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
        modules = [(name, model.get_submodule(name)) for name in sorted(called)]
        children = [(name, module) for name, module in modules if not isinstance(module, (Quantizer, QuantLayer))]
    for name, child in children:
        calls |= quantizer_calls(child, joined(path, name))
    return calls


def joined(path: str, name: str) -> str:
    """Join a path and a name; the model itself is at ""."""
    return f"{path}.{name}" if path else name


def numbered(name: str, seen: Counter[str]) -> str:
    """Return the name, with a number from its second use on; `seen` counts the uses."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}.{seen[name] - 1}"


def _drop_resting(model: fx.GraphModule) -> None:
    for node in list(model.graph.nodes):
        if rests(submodule_of(model, node)) and len(node.all_input_nodes) == 1:
            node.replace_all_uses_with(node.all_input_nodes[0])
            model.graph.erase_node(node)


def _drop_sized(model: fx.GraphModule) -> None:
    # Leave out quantizers of tensors of which only the size is read: a file would lack them.
    read: set[fx.Node] = set()
    for node in reversed(model.graph.nodes):
        values = any(user in read and not asks_for_shape(user) for user in node.users)
        if values or node.op == "output" or written_by(node, model) is not None:
            read.add(node)
        elif isinstance(submodule_of(model, node), Quantizer):
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)


@torch.no_grad()
def _fold(model: fx.GraphModule, fold_quantizers: bool) -> None:
    # Store what layers compute from parameters alone: it never changes, and a runtime would compute it differently. A
    # quantized parameter that a matrix product reads is left, unless asked for: it is stored as integers.
    fixed = constant_nodes(model.graph, layers=True)
    left = () if fold_quantizers else Quantizer
    if not any(node.op == "call_module" and not isinstance(submodule_of(model, node), left) for node in fixed):
        return
    interpreter = fx.Interpreter(model, garbage_collect_values=False)
    for number, node in enumerate(list(model.graph.nodes)):
        if node not in fixed:
            continue
        interpreter.env[node] = value = interpreter.run_node(node)
        readers = [user for user in node.users if user not in fixed]
        if not readers or not isinstance(value, Tensor) or node.op == "get_attr":
            continue
        if not isinstance(submodule_of(model, node), left):
            model.register_buffer(f"folded_{number}", value.detach().clone())
            with model.graph.inserting_after(node):
                folded = model.graph.get_attr(f"folded_{number}")
            for user in readers:
                user.replace_input_with(node, folded)
    for node in reversed(model.graph.nodes):  # guards on what is folded have held; they would keep it all
        if node in fixed and not node.users and written_by(node, model) is None:
            model.graph.erase_node(node)
    drop_unread(model.graph, model)
