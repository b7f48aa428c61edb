"""One graph for both modes of a model, with and without its optional arguments.

Dropouts, auxiliary outputs, branches on `self.training` and norms by function depend on the mode. Tracing reads
`self.training` once, so the model is traced in both modes. Nodes of both traces are merged, nodes of one trace are
added, and `ByMode` picks the outputs at every call. A call may leave out arguments such as labels: `WhenGiven` then
leaves out what depends on them.
"""

import contextlib
import copy
import operator
import os
from collections.abc import Collection
from typing import Any, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.contexts import evaluating
from qat.graph.capture import check_answer, check_modules, graph_of, log
from qat.graph.exporting import Captured
from qat.graph.guards import EXPECTATIONS
from qat.graph.in_place import written_by
from qat.graph.nodes import FACTS, free_name, given_by_name, scope_of, submodule_of
from qat.graph.operations import TABLE
from qat.graph.operators import LOWEST_FIRST
from qat.graph.side_effects import CaptureError, LostStateError
from qat.inputs import Examples
from qat.text import first_line
from qat.torch_internals import GRAPH_CONSTANT, AnyBatchNorm, buffers_of, children_of, unsaved_buffers_of

Graph = TypeVar("Graph", bound=fx.GraphModule)

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TENSORS = ("running_mean", "running_var", "weight", "bias")
DROPOUTS = {function: row.modules[0] for row in TABLE if row.kind == "dropout" for function in row.functions}
DROPOUT = ("input", "p", "training", "inplace")
ARGUMENTS = ("input", *TENSORS, "training", "momentum", "eps")


def trace(model: nn.Module, examples: Examples, graph_class: type[Graph]) -> Graph:
    """Return the model as a graph module that shares its submodules and modes.

    Raises:
        CaptureError: if the model cannot be captured, or if only evaluation applies a BatchNorm.
    """
    check_modules(model, graph_class)
    with evaluating(model):
        evaluation = graph_of(model, examples, ("all", "batch", "none"))
        training, in_evaluation = _in_training(model.train(), examples, evaluation), evaluation.graph
    norms = [spelled_out(model, training, True), spelled_out(model, in_evaluation, False)]
    in_both = [name for name in norms[0] if name in norms[1]]
    for name in in_both:
        call_norm(training, name, norms[0][name])
        call_norm(in_evaluation, name, norms[1][name])
    counterparts = _merge(model, training, in_evaluation)
    for name in in_both:  # the norm applies itself alone; the graph calls its children behind it
        norm = model.get_submodule(name)
        norm.__class__ = next(kind for kind in type(norm).__mro__ if kind in NORMS)
    for node in training.nodes:
        if node.op != "output" and not node.args and "input" in node.kwargs:  # layer(input=x) and such
            node.args, node.kwargs = (node.kwargs["input"],), {k: v for k, v in node.kwargs.items() if k != "input"}
    graph_module = graph_class(model, training, type(model).__name__)
    _keep_state(model, graph_module)
    for name, module in model.named_modules():  # torch 2.11 makes all buffers persistent
        if unsaved := unsaved_buffers_of(module):
            unsaved_buffers_of(graph_module.get_submodule(name)).update(unsaved)
    # Constants are not part of the state: forward created them.
    unsaved_buffers_of(graph_module).update(
        name for name in buffers_of(graph_module) if name.startswith(GRAPH_CONSTANT)
    )
    _dropouts_become_modules(graph_module, counterparts)
    _outputs_by_mode(graph_module, in_evaluation, counterparts, evaluation.asks_mode)
    leave_out(graph_module, model, examples)
    for node in graph_module.graph.nodes:  # only now, since the model itself takes any of equal values
        node.target = LOWEST_FIRST.get(node.target, node.target) if node.op == "call_function" else node.target
    graph_module.graph = graph_module.graph  # it was run as another module's; this recompiles, too
    return graph_module


def _in_training(model: nn.Module, examples: Examples, evaluation: Captured) -> fx.Graph:
    # Where training cannot be captured, this is the graph of evaluation, with dropouts that act.
    graph = copy.deepcopy(evaluation.graph)
    if not evaluation.asks_mode:
        with contextlib.suppress(CaptureError):  # its hooks or `train` may do something else
            check_answer(model, examples, graph)
            return graph
    try:
        return graph_of(model, examples, (evaluation.free, "none")).graph
    except LostStateError:
        raise
    except CaptureError as error:
        for node in [node for node in graph.nodes if node.target in DROPOUTS]:
            given = given_by_name(node, DROPOUT)
            node.args, node.kwargs = (given["input"], given.get("p", 0.5), True), {}
        reason = first_line(error)
    try:
        check_answer(model, examples, graph)
    except LostStateError:
        raise
    except CaptureError:
        log.warning(
            "%s cannot be captured in training: %s. In training the prepared model computes what it computes in"
            " evaluation, with dropouts and norms in training mode", type(model).__name__, reason,
        )  # fmt: skip
    except Exception as error:  # it needs labels, or images of another size
        raise CaptureError(f"{type(model).__name__} does not run in training: {first_line(error)}") from error
    return graph


def _keep_state(model: nn.Module, graph_module: fx.GraphModule) -> None:
    # Float checkpoints also hold parameters and buffers that no node reads.
    present = dict(graph_module.named_parameters(remove_duplicate=False))
    present |= dict(graph_module.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if name in present:
            continue
        path, _, last = name.rpartition(".")
        if path not in dict(graph_module.named_modules(remove_duplicate=False)):
            graph_module.add_submodule(path, nn.Module())
        owner, source = graph_module.get_submodule(path), model.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=last not in unsaved_buffers_of(source))


def _merge(model: nn.Module, training: fx.Graph, evaluation: fx.Graph) -> dict[fx.Node, fx.Node]:
    # Add the nodes of evaluation alone to the training graph, and map all nodes of evaluation to theirs there.
    same: dict[tuple[str, str, str], list[fx.Node]] = {}
    attached: dict[fx.Node, fx.Node] = {}  # a detached tensor has the same values: a head may read that in training
    for node in training.nodes:
        same.setdefault(_what(node, attached), []).append(node)
        if node.target == "detach":
            attached[node] = attached.get(node.args[0], node.args[0])
    counterparts: dict[fx.Node, fx.Node] = {}
    end = training.output_node()
    for node in evaluation.nodes:
        if node.op == "output":
            continue
        known = {each: attached.get(counterparts[each], counterparts[each]) for each in node.all_input_nodes}
        candidates = same.get(_what(node, known), [])
        if candidates:
            counterparts[node] = candidates.pop(0)  # calls that repeat are matched in their order
            continue
        if node.target == "detach":
            counterparts[node] = counterparts[node.args[0]]
            continue
        _check_side_effects(node, "evaluation", model)
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), AnyBatchNorm):
            raise CaptureError(
                f"{type(model).__name__} applies {node.target} to something else in evaluation than in training, and"
                " one graph for both would update its statistics with both"
            )
        with training.inserting_before(end):
            counterparts[node] = training.node_copy(node, lambda argument: counterparts[argument])
    shared = set(counterparts.values())
    for node in training.nodes:
        if node not in shared and node.op != "output":
            _check_side_effects(node, "training", model)
    return counterparts


def _check_side_effects(node: fx.Node, mode: str, model: nn.Module) -> None:
    # In a merged graph both modes run every node: one that changes the model in one mode alone is refused.
    target = node.args[0] if node.args else None
    while isinstance(target, fx.Node) and target.op in ("call_method", "call_function") and target.args:
        target = target.args[0]
    writes = written_by(node, model) is not None and isinstance(target, fx.Node) and target.op == "get_attr"
    if writes or node.target is F.batch_norm:
        raise CaptureError(f"{type(model).__name__} changes its own state ({node.name}) in {mode} only")


def _what(node: fx.Node, known: dict[fx.Node, fx.Node]) -> tuple[str, str, str]:
    # A key that is equal for nodes that do the same to the same inputs. A `training` flag does not count for dropouts,
    # which become modules later, nor where it has no effect: beside dropouts that are 0.
    args, ignored = node.args, set[str]()
    dropouts = [value for key, value in node.kwargs.items() if "dropout" in key]
    if node.target in DROPOUTS:
        args, ignored = node.args[:1], {"p", "training"}
    elif dropouts and not any(dropouts):
        ignored = {"training"}
    kwargs = {key: value for key, value in node.kwargs.items() if key not in ignored}
    mapped = fx.node.map_arg((args, kwargs), lambda argument: known.get(argument, argument))
    return node.op, str(node.target), repr(mapped)


def _dropouts_become_modules(graph_module: fx.GraphModule, counterparts: dict[fx.Node, fx.Node]) -> None:
    # F.dropout(x, p, training=self.training), traced in one mode, becomes nn.Dropout(p), which follows the mode.
    here = set(graph_module.graph.nodes)
    for other, node in list(counterparts.items()):
        if node.target not in DROPOUTS or node not in here:
            continue
        given, in_evaluation = given_by_name(node, DROPOUT), given_by_name(other, DROPOUT)
        if given.get("training", True) != in_evaluation.get("training", True):
            name = free_name(graph_module, f"{scope_of(node)}.dropout".lstrip("."))
            graph_module.add_submodule(name, DROPOUTS[node.target](given.get("p", 0.5), given.get("inplace", False)))
            node.op, node.target, node.args, node.kwargs = "call_module", name, (given["input"],), {}
        elif not given.get("training", True):
            # False in both modes: the model wants no dropout. True in both would be Monte-Carlo dropout.
            node.replace_all_uses_with(given["input"])
            counterparts[other] = given["input"]
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _outputs_by_mode(
    graph_module: fx.GraphModule, evaluation: fx.Graph, counterparts: dict[fx.Node, fx.Node], asking: Collection[str]
) -> None:
    end = graph_module.graph.output_node()
    in_evaluation = fx.node.map_arg(evaluation.output_node().args[0], lambda node: counterparts[node])
    if repr(in_evaluation) == repr(end.args[0]):
        return
    layers = {str(node.target) for node in graph_module.graph.find_nodes(op="call_module")}  # a graph looks into none
    asked = _where_ways_part(end.args[0], in_evaluation, set(asking) - layers)
    common = os.path.commonpath(["/" + path.replace(".", "/") for path in asked])[1:].replace("/", ".")
    with graph_module.graph.inserting_before(end):
        modes = [_call(graph_module, ByMode(), path, True, False) for path in asked if path != common]
        result = _call(graph_module, ByMode(asked), common, end.args[0], in_evaluation, *modes)
    end.args = (result,)


def _call(graph_module: fx.GraphModule, module: nn.Module, scope: str, *args: Any) -> fx.Node:
    name = free_name(graph_module, f"{scope}.by_mode".lstrip("."))
    graph_module.add_submodule(name, module)
    return graph_module.graph.call_module(name, args)


def _where_ways_part(training: Any, evaluation: Any, asking: Collection[str]) -> list[str]:
    # The modules whose mode may decide: those that ask for it, around nodes that run in one mode alone or feed these.
    ways = [_read_by(training), _read_by(evaluation)]
    parting = [node for node in {**ways[0], **ways[1]} if (node in ways[0]) != (node in ways[1])]
    scopes = {f"{scope_of(each)}." for node in parting for each in (node, *node.all_input_nodes)}
    return sorted(p for p in asking if not p or any(scope.startswith(f"{p}.") for scope in scopes)) or [""]


def _read_by(result: Any) -> dict[fx.Node, None]:
    found, left = dict[fx.Node, None](), list[fx.Node]()
    fx.node.map_arg(result, left.append)
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            left += node.all_input_nodes
    return found


def evaluation_only(graph_module: fx.GraphModule) -> None:
    """Keep only what evaluation computes, in place; export needs no more."""
    end = graph_module.graph.output_node()
    node = end.args[0]
    if isinstance(node, fx.Node) and isinstance(submodule_of(graph_module, node), ByMode):
        _, evaluation, *modes = node.args
        end.args = (evaluation,)
        for each in (node, *modes):
            graph_module.graph.erase_node(cast("fx.Node", each))


def spelled_out(model: nn.Module, graph: fx.Graph, training: bool) -> dict[str, list[fx.Node]]:
    """Find norms that a mode's graph applies only as `nn.BatchNorm2d.forward` does.

    Returns:
        Name of the norm to the nodes that apply it and, in training, those that count the batches.
    """
    found: dict[str, list[fx.Node]] = {}
    counted: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is F.batch_norm:
            found.setdefault(_norm_of(node, model, training), []).append(node)
        elif node.op == "call_method" and node.target == "add_" and node.args[1:] == (1,) and not node.users:
            owner, _, name = str(getattr(source, "target", "")).rpartition(".")
            if name == "num_batches_tracked" and isinstance(source, fx.Node) and source.op == "get_attr":
                counted.setdefault(owner, []).append(node)
    found.pop("", None)
    steps = {name: len(applied) * training for name, applied in found.items()}
    return {
        name: applied + counted.get(name, [])
        for name, applied in found.items()
        if len(counted.get(name, [])) == steps[name]
    }


def _norm_of(node: fx.Node, model: nn.Module, training: bool) -> str:
    # The name of the norm that would do the same when it is called; "" if there is none.
    given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    given |= given_by_name(node, ARGUMENTS)
    owner = str(getattr(given["running_mean"], "target", "")).rpartition(".")[0]
    norm = dict(model.named_modules()).get(owner) if owner else None
    if not isinstance(norm, NORMS) or not norm.track_running_stats:
        return ""
    reads = all(
        (value is None and getattr(norm, name) is None)
        or (isinstance(value, fx.Node) and value.op == "get_attr" and value.target == f"{owner}.{name}")
        for name, value in ((name, given[name]) for name in TENSORS)
    )
    numbers = given["training"], given["momentum"], given["eps"]
    return owner if reads and numbers == (training, norm.momentum, norm.eps) else ""


def call_norm(graph: fx.Graph, name: str, nodes: list[fx.Node]) -> None:
    """Replace the nodes that `spelled_out` found of a norm by calls of its module."""
    for node in nodes:
        read = node.all_input_nodes
        if node.target is F.batch_norm:
            x = given_by_name(node, ARGUMENTS)["input"]
            node.op, node.target, node.args, node.kwargs = "call_module", name, (x,), {}
        else:
            graph.erase_node(node)
        for source in read:
            if source.op == "get_attr" and not source.users:
                graph.erase_node(source)


class ByMode(nn.Module):
    """Returns the first of two values in training, the second in evaluation.

    It stands inside of the module that asked for its mode, and so follows that one; of several, all have to agree.
    """

    def __init__(self, paths: Collection[str] = ()) -> None:
        super().__init__()
        self.paths = [path or "the model" for path in paths]

    def forward(self, training: object, evaluation: object, *modes: bool) -> object:
        """Return the value for the present mode."""
        if any(mode != self.training for mode in modes):
            raise ValueError(
                f"forward of each of {', '.join(self.paths)} asks for its mode, and the prepared model has one graph"
                " for all of them in training and one for all in evaluation; set them to the same mode"
            )
        return training if self.training else evaluation


class WhenGiven(nn.Module):
    """Computes a part of a graph from an argument; without it, its results are None."""

    def __init__(self, part: fx.GraphModule, results: int) -> None:
        super().__init__()
        self.part, self.results = part, results

    def forward(self, given: Tensor | None, *others: object) -> tuple[object, ...]:
        """Return the results of the part."""
        return (None,) * self.results if given is None else tuple(self.part(given, *others))


def leave_out(graph_module: fx.GraphModule, model: nn.Module, examples: Examples) -> None:
    """Let calls leave out optional tensors that not every result needs, in place.

    This is done for an argument if the model, called without it, returns the same other results.
    """
    for name in [node.target for node in graph_module.graph.find_nodes(op="placeholder") if node.args == (None,)]:
        if not isinstance(examples.get(str(name)), Tensor):
            continue
        graph, kept = copy.deepcopy(graph_module.graph), set(children_of(graph_module))
        try:
            if _split(graph_module, str(name)):
                fewer = {key: value for key, value in examples.items() if key != name}
                with evaluating(model):
                    for given in (fewer, examples):  # the last notes the facts
                        check_answer(model, given, graph_module.graph, owner=graph_module)
        except Exception:  # forward needs the argument
            graph_module.graph = graph
            for added in children_of(graph_module).keys() - kept:
                delattr(graph_module, added)


def _packs_results(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    packs = isinstance(node.target, type) or isinstance(submodule_of(graph_module, node), ByMode)
    return node.op == "output" or packs


def _split(graph_module: fx.GraphModule, name: str) -> bool:
    # Move what depends on an argument into a module of its own; False if every result depends on it.
    graph = graph_module.graph
    argument = next(node for node in graph.find_nodes(op="placeholder") if node.target == name)
    inside: dict[fx.Node, None] = {}
    for node in graph.nodes:
        follows = any(source is argument or source in inside for source in node.all_input_nodes)
        if follows and node.target not in EXPECTATIONS and not _packs_results(node, graph_module):
            inside[node] = None
            module = submodule_of(graph_module, node)
            if module is not None and any(True for _ in module.parameters()):
                return False  # a layer has to be in the graph itself, to be quantized
    ends = [node for node in graph.nodes if _packs_results(node, graph_module)]
    results = [node for node in inside if any(user not in inside for user in node.users)]
    others = {source for end in ends for source in end.all_input_nodes} - set(inside) - set(ends)
    if not results or not any(node.meta.get(FACTS) for node in others):
        return False
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes)
    inputs = [source for source in read if source not in inside and source is not argument]
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in (argument, *inputs):
        copies[source] = part.placeholder(source.name)
    for node in inside:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output([copies[node] for node in results])
    place = free_name(graph_module, f"when_{name}_given")
    graph_module.add_submodule(place, WhenGiven(fx.GraphModule(graph_module, part), len(results)))
    with graph.inserting_before(ends[0]):
        call = graph.call_module(place, (argument, *inputs))
        for number, node in enumerate(results):
            found = graph.call_function(operator.getitem, (call, number))
            found.meta |= node.meta
            node.replace_all_uses_with(found, lambda user: user in ends)
    for node in reversed(list(inside)):
        graph.erase_node(node)
    return True
