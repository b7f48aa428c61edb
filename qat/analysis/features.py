"""`feature_extractor`: the outputs of layers and blocks of a prepared model."""

from collections.abc import Mapping, Sequence

from torch import fx, nn

from qat.graph.in_place import drop_unread
from qat.graph.nodes import scope_of, submodule_of
from qat.inputs import expect_model
from qat.preparation.prepared_graph import PreparedGraph, class_of
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT, PROFILE
from qat.quantizer import Quantizer
from qat.text import did_you_mean
from qat.torch_internals import keep_signature


def feature_extractor(model: nn.Module, names: Sequence[str] | Mapping[str, str]) -> nn.Module:
    """Return a model that returns the outputs of parts of a prepared one, by name.

    It shares the modules of the prepared model, so both train, evaluate and export with the same parameters. A block
    returns what it returns in the float model, on its grid if it has one. A layer returns its output after the
    BatchNorm that is folded into it, and before a following activation. (Hooks on blocks never fire, since a prepared
    model calls the layers in a block and not the block.)

    Args:
        model: from `prepare`, traced as one graph.
        names: of layers, blocks or quantizers of the model ("layer1", "layer4.1.conv2"), "" for its own output; or
            such names mapped to the keys of the dictionary.

    Raises:
        TypeError: if the model is not one graph: it was prepared in parts, or not prepared.
        ValueError: if nothing in the model runs under a name, or two names have one key.

    >>> import torch, qat
    >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(64, 2))
    >>> model = qat.prepare(net, example_inputs=torch.randn(1, 3, 6, 6))
    >>> qat.calibrate(model, [torch.randn(8, 3, 6, 6)])
    >>> found = qat.feature_extractor(model, {"0": "block", "2": "scores"})(torch.randn(5, 3, 6, 6))
    >>> {name: tuple(tensor.shape) for name, tensor in found.items()}
    {'block': (5, 4, 4, 4), 'scores': (5, 2)}
    """
    expect_model(feature_extractor, model)
    if not isinstance(model, PreparedGraph):
        raise TypeError(
            f"feature_extractor: {type(model).__name__} has no one graph; give it a model from qat.prepare, or one of"
            " its parts, see qat.preparation.parts.prepared_parts(model)"
        )
    model._follow_changes()  # modules that were replaced since
    keys = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    if len({*keys.values()}) < len(keys):
        raise ValueError(f"feature_extractor: several names have one key in {keys}; give each a key of its own")
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(model.graph, copied)
    keep_signature(model.graph, graph)
    ends = {key: copied[_end_of(name, model)] for name, key in keys.items()}
    graph.output(ends)
    drop_unread(graph, model)
    found = class_of(model)(model, graph, f"{type(model).__name__}Features")
    for note in (LEFT_IN_FLOAT, COMPROMISES, LAYERS, PROFILE):
        vars(found)[note] = vars(model).get(note, {})
    return found.train(model.training)


def _end_of(name: str, model: fx.GraphModule) -> fx.Node:
    # The node that holds the output of a part of the model, on its grid if it has one.
    if not name:
        returned = model.graph.output_node().args[0]
        if not isinstance(returned, fx.Node):
            raise ValueError(f"feature_extractor: the model returns a {type(returned).__name__}, and '' is one tensor")
        return returned
    inside = [node for node in model.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    named = [node for node in inside if _is_of(node, name)]
    if not named:
        paths = [scope_of(node).split(".") for node in inside]
        scopes = {".".join(steps[:end]) for steps in paths for end in range(1, len(steps) + 1)} - {""}
        known = sorted({str(node.target) for node in inside if node.op == "call_module"} | scopes)
        hint = did_you_mean(name, known, count=3) or f"parts are called {', '.join(known[:3])} ..."
        raise ValueError(f"feature_extractor: nothing runs in {name!r}; {hint}")
    last: fx.Node = named[-1]  # of a block its last step
    return next((user for user in last.users if isinstance(submodule_of(model, user), Quantizer)), last)


def _is_of(node: fx.Node, name: str) -> bool:
    # True if a node runs in a module of this name, or computes the BatchNorm of this name.
    paths = [scope_of(node)] + ([str(node.target)] if node.op == "call_module" else [])
    norm = node.kwargs.get("norm")
    if isinstance(norm, fx.Node):
        paths.append(str(norm.target))
    return any(path == name or path.startswith(f"{name}.") for path in paths)
