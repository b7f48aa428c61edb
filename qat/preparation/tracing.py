"""torch.fx tracing of a float model, with module paths kept so that new modules get telling names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.evaluating import evaluating


class QuantTracer(fx.Tracer):
    """fx.Tracer whose graphs may pass a submodule as an argument: a layer is handed its grid and its BatchNorm.

    That makes a prepared model picklable too, because GraphModule is rebuilt by tracing its code again.
    """

    def create_arg(self, a: Any) -> Any:
        """A submodule used as an argument becomes a get_attr node."""
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.path_of_module(a), (), {})
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """torch's own modules, and modules whose forward depends on train or eval mode without owning anything.

        Tracing would bake the mode in; torchvision's StochasticDepth is such a module.
        """
        acts_by_mode = type(m).__name__ == "StochasticDepth"
        return acts_by_mode or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> fx.GraphModule:
    """The model as a graph module that shares the model's submodules and acts by train and eval mode as the model does.

    Tracing reads `self.training` once. A functional dropout, the usual reader, becomes a Dropout module; a model that
    computes something else in training than in evaluation is refused.

    Raises:
        ValueError: if torch.fx cannot trace the model, or if it takes another path in training than in evaluation.
    """
    with evaluating(model):
        in_evaluation = _graph_of(model)
        training = _graph_of(model.train())
    if _outline(training) != _outline(in_evaluation):
        raise ValueError(
            f"prepare: {type(model).__name__} takes another path in training than in evaluation (auxiliary outputs?),"
            " and a prepared model has one path; switch that off, for torchvision's with aux_logits=False"
        )
    for node in training.nodes:
        if node.op != "output" and not node.args and "input" in node.kwargs:  # layer(input=x) and such
            node.args, node.kwargs = (node.kwargs["input"],), {k: v for k, v in node.kwargs.items() if k != "input"}
    graph_module = fx.GraphModule(model, training, type(model).__name__)
    _dropouts_become_modules(graph_module, in_evaluation)
    return graph_module


def _graph_of(model: nn.Module) -> fx.Graph:
    try:
        graph = QuantTracer().trace(model)
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"prepare: torch.fx cannot trace {type(model).__name__}: {first_line};"
            " control flow that depends on tensor values has to move out of forward"
        ) from error
    graph._tracer_cls = QuantTracer  # what unpickling traces with
    return graph


def _outline(graph: fx.Graph) -> list[tuple[str, str, str, str]]:
    # Constants are numbered through over all traces of a model, so their names say nothing.
    position = {node: str(number) for number, node in enumerate(graph.nodes)}

    def words(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda node: position[node]))

    steps = []
    for node in graph.nodes:
        args, kwargs = _without_idle_mode(node)
        steps.append((node.op, str(node.target).rstrip("0123456789"), words(args), words(kwargs)))
    return steps


def _without_idle_mode(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments without a `training` that does not count.

    That is F.dropout's, which `_dropouts_become_modules` takes care of, and that of functions whose dropouts are all 0
    (torchvision's shifted_window_attention).
    """
    if node.target is F.dropout:
        return (*node.args[:2], *node.args[3:]), {key: it for key, it in node.kwargs.items() if key != "training"}
    dropouts = [value for key, value in node.kwargs.items() if "dropout" in key]
    idle = bool(dropouts) and not any(dropouts)
    return node.args, {key: it for key, it in node.kwargs.items() if not (idle and key == "training")}


def _dropouts_become_modules(graph_module: fx.GraphModule, in_evaluation: fx.Graph) -> None:
    """F.dropout(x, p, training=self.training) was traced with one mode; nn.Dropout(p) asks for it at every call."""

    def arguments(node: fx.Node) -> dict[str, Any]:
        return {**dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)), **node.kwargs}

    for node, other in zip(list(graph_module.graph.nodes), list(in_evaluation.nodes), strict=True):
        given = arguments(node)
        # The same in both modes is what the model asks for: never, or always (Monte-Carlo dropout).
        if node.target is F.dropout and given.get("training", True) != arguments(other).get("training", True):
            name = free_name(graph_module, f"{scope_of(node)}.dropout".lstrip("."))
            graph_module.add_submodule(name, nn.Dropout(given.get("p", 0.5)))
            node.op, node.target, node.args, node.kwargs = "call_module", name, (given["input"],), {}
    graph_module.recompile()


def scope_of(node: fx.Node) -> str:
    """Path of the module whose forward created this node, "" at the top."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def tensor_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that hold tensors, as far as the graph tells: not sizes, shapes, and what is computed from them."""
    held: set[fx.Node] = set()
    plain_results = {"size", "dim", "numel", "item"}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "call_module"):
            held.add(node)
        elif node.op == "call_method":
            if node.target not in plain_results and any(argument in held for argument in node.all_input_nodes):
                held.add(node)
        elif node.op == "call_function":
            asks_shape = node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")
            if not asks_shape and any(argument in held for argument in node.all_input_nodes):
                held.add(node)
    return held


def submodule_of(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a call_module node calls, else None."""
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_call(node: fx.Node, modules: tuple[type[nn.Module], ...], functions: set[Any], methods: set[str],
            graph_module: fx.GraphModule) -> bool:  # fmt: skip
    """Whether a node applies one of these modules (exact types), functions or tensor methods."""
    if node.op == "call_module":
        return type(submodule_of(graph_module, node)) in modules
    if node.op == "call_function":
        return node.target in functions
    return node.op == "call_method" and node.target in methods


def free_name(graph_module: nn.Module, wanted: str) -> str:
    """`wanted`, or wanted_1, wanted_2 ... if the model has something of that name."""
    taken = {name for name, _ in graph_module.named_modules()} | set(graph_module.state_dict())
    candidate, number = wanted, 0
    while candidate in taken or ("." not in candidate and hasattr(graph_module, candidate)):
        number += 1
        candidate = f"{wanted}_{number}"
    return candidate


def model_device(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
