"""`summary`: a prepared model as a table."""

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx, nn

from qat.analysis.state import not_finite
from qat.graph.leaves import is_leaf
from qat.graph.nodes import constant_nodes, submodule_of
from qat.graph.operations import AVERAGING, JOINING, NONLINEAR
from qat.inputs import expect_model
from qat.layers import QuantLayer
from qat.layers.twins import CompositeTwin, QuantTwin, layers_of
from qat.preparation.operations import is_relu, operation_of
from qat.preparation.parts import prepared_parts
from qat.preparation.placement import is_convolution, readings
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT, PROFILE, VERDICTS, WHOLE_MODEL, notes_of
from qat.preparation.swapping import call_own_quantizers
from qat.quantizer import Quantizer
from qat.targets import TargetProfile
from qat.text import plural, some, table
from qat.torch_internals import AnyBatchNorm

ALL = {**JOINING, **AVERAGING, **NONLINEAR}

HEADER = ("name", "type", "grid", "rule", "parameters", "remark")

PUT_THERE = "it was put there after the model was prepared"
UNPREPARED = "it is a layer of torch, and qat.prepare was not called on this model"

Row = tuple[str, str, str, str, str, str]


def summary(model: nn.Module) -> str:
    """Tabulate layers and quantizers with their grids, and what stays float and why.

    Args:
        model: from `prepare`, or any module that holds quantized layers.

    Returns:
        The table as text, with one row for each layer or quantizer, in the order in which they run; below it, the
        counts, why the model is prepared in parts, and which, if it is, and the result of the self-check of training;
        or which layers of your own an exported file computes in float.

    >>> import torch, qat
    >>> print(summary(qat.prepare(nn.Sequential(nn.Linear(8, 2)), example_inputs=torch.randn(4, 8))))
    name             type          grid                               rule  parameters  remark
    input_quantizer  LSQQuantizer  uint8 affine per tensor            lsq   1           not calibrated
    0                QuantLinear   int8 narrow symmetric per channel  lsq   20          input: input_quantizer
    <BLANKLINE>
    1 quantized layer, 1 activation quantizer, 0 layers in float; 18 float parameters, 3 quantizer parameters
    """
    expect_model(summary, model)
    remarks = {**_inputs(model), **notes_of(model, COMPROMISES)}
    reasons = notes_of(model, LEFT_IN_FLOAT)
    in_parts = reasons.pop(WHOLE_MODEL, None)
    kinds = notes_of(model, LAYERS)
    for name, _ in layers_of(model):
        if not isinstance(model.get_submodule(name), QuantTwin):
            reasons.setdefault(name, PUT_THERE if kinds else UNPREPARED)
    rows = [_row(name, module, remarks) for name, module in layers_in_order(model)]
    rows += [_float_row(name, model, reason, kinds) for name, reason in reasons.items()]
    own = float_results(model)
    in_float = sum(name in kinds or _module(model, name) is not None for name in reasons) + len(own)
    lines = [*table([HEADER, *rows]), "", _counts(model, in_float)]
    if in_parts is not None:
        lines += [f"the model is {in_parts}", f"parts that are one graph: {', '.join(prepared_parts(model)) or 'none'}"]
    lines += [sentence_about(own)] if own else []
    lines += [bad] if (bad := not_finite(model)) else []
    return "\n".join([*lines, *_between(model), *_verdicts(model)])


def _between(model: nn.Module) -> Iterator[str]:
    # The operations without parameters that the target computes in float between integers, and why.
    for prefix, part in graphs_of(model):
        profile: TargetProfile | None = vars(part).get(PROFILE)
        if not profile:  # a graph of the user's own
            continue
        constant = constant_nodes(part.graph)
        found = Counter(operation_of(node, part, ALL) for node in part.graph.nodes if node not in constant)
        named = [f"{count} {name}" for name, count in found.most_common() if name in profile.float_operations]
        reason = profile.reasons.get("float_operations")
        if named:
            where = f" in {prefix.rstrip('.')}" if prefix else ""
            why = f": {reason.text}" if reason else ""
            yield f"{profile.name} computes {', '.join(named)} between the layers{where} in float{why}"
        # ConvInteger and a Mul take 1.6 to 5.4 times as long as a convolution in float (x86, VNNI).
        called = (node for node in part.graph.nodes if is_convolution(submodule_of(part, node)))
        ends = dict.fromkeys(f"{prefix}{node.target}" for node in called if _is_answer(node, part))
        if ends and profile.name.startswith("onnxruntime"):
            why = "its integer ones give integers, to a quantizer behind them"
            yield f"{profile.name} computes the convolutions that give answers in float ({some([*ends])}): {why}"


def _is_answer(node: fx.Node, part: fx.GraphModule) -> bool:
    # The model returns its result, behind norms and ReLUs.
    ends = [reader for reader, _ in readings(node, part)]
    behind = [end for end in ends if is_relu(end, part) or isinstance(submodule_of(part, end), AnyBatchNorm)]
    return any(end.op == "output" for end in ends) or any(_is_answer(end, part) for end in behind)


def _verdicts(model: nn.Module) -> Iterator[str]:
    # The verdict of the self-check may be older than a switch: then explain knows more.
    for prefix, graph_module in graphs_of(model):
        name = prefix.rstrip(".") or "the model"
        off = sum(isinstance(module, Quantizer) and module.is_disabled for module in graph_module.modules())
        verdict = next(reversed(vars(graph_module).get(VERDICTS, {}).values()), None)
        if off:
            yield f"{name} has {plural(off, 'quantizer')} switched off; qat.explain says how it trains now"
        elif verdict is not None:
            yield f"{name} {verdict}"


def layers_in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return layers and activation quantizers as they run, else as registered."""
    wanted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantLayer) or (isinstance(module, Quantizer) and module.role == "activation")
    }
    order: dict[str, None] = {}
    for prefix, graph_module in graphs_of(model):
        for node in graph_module.graph.nodes:
            if submodule_of(graph_module, node) is not None:
                called = f"{prefix}{node.target}"
                if called in wanted:
                    order[called] = None
                elif isinstance(model.get_submodule(called), CompositeTwin):  # its call runs the products in it
                    order |= dict.fromkeys(name for name in wanted if name.startswith(f"{called}."))
    return [(name, wanted[name]) for name in (*order, *(name for name in wanted if name not in order))]


def quantizers_in_order(model: nn.Module) -> list[str]:
    """Return the names of the quantizers of `layers_in_order`."""
    return [
        f"{name}.weight_quantizer".lstrip(".") if isinstance(module, QuantLayer) else name
        for name, module in layers_in_order(model)
    ]


def graphs_of(model: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the traced parts of the model, each with the prefix of its names."""
    for name, module in model.named_modules():
        if isinstance(module, fx.GraphModule):
            yield f"{name}." if name else "", module


def _inputs(model: nn.Module) -> dict[str, str]:
    # For every layer called in a graph: the quantizer of its input, and the BatchNorm that it folds.
    found: dict[str, dict[str, None]] = {}  # a layer that is called several times may read and fold several
    for prefix, graph_module in graphs_of(model):
        for node in graph_module.graph.nodes:
            if isinstance(submodule_of(graph_module, node), QuantLayer):
                quantizer, norm = (node.kwargs.get(key) for key in ("input_quantizer", "norm"))
                text = f"input: {prefix}{quantizer.target}" if isinstance(quantizer, fx.Node) else "input: indices"
                folds = f", folds {prefix}{norm.target}" if isinstance(norm, fx.Node) else ""
                folds += SCALED * bool(folds and _lost(graph_module.get_submodule(str(node.target))))
                found.setdefault(f"{prefix}{node.target}", {})[f"{text}{folds}"] = None
    return {name: "; ".join(said) for name, said in found.items()}


SCALED = ", which gives each channel a scale of its own"
"""End of the remark on a layer whose BatchNorm takes away what its grid promises."""


def _lost(layer: nn.Module) -> bool:
    assert isinstance(layer, QuantLayer)
    spec = layer.weight_quantizer.spec
    return spec.granularity == "tensor" or spec.rule == "power_of_two"


def warn_of_scales(model: nn.Module) -> None:
    """Warn of layers whose weight's grid does not outlive the folding of BatchNorm."""
    if found := [name for name, said in _inputs(model).items() if SCALED in said]:
        logging.getLogger("qat").warning(
            "prepare: the BatchNorm behind %s gives each channel a scale of its own when it is folded; where"
            " granularity='tensor' or the rule 'power_of_two' has to hold in the file, fold it first, as by"
            " torch.nn.utils.fuse_conv_bn_eval", some(found),
        )  # fmt: skip


def _row(name: str, module: nn.Module, remarks: dict[str, str]) -> Row:
    quantizer = module.weight_quantizer if isinstance(module, QuantLayer) else module
    assert isinstance(quantizer, Quantizer)
    said = remarks.get(name) or _own_input(name, module)
    parts = [said, *quantizer.switches(), "" if quantizer.is_calibrated else "not calibrated"]
    remark = "; ".join(part for part in parts if part)
    grid, rule = quantizer.describe(), quantizer.spec.rule
    if SCALED in said:  # neither is the file's
        grid = grid.replace("per tensor", "per channel, folded")
        rule = rule.replace("power_of_two", "power_of_two, folded")
    return name, type(module).__name__, grid, rule, _size(module), remark


def _own_input(name: str, module: nn.Module) -> str:
    if not isinstance(module, QuantLayer):
        return ""
    if not module.has_input_grid:
        return "input: indices"
    own = f"{name}.input_quantizer" if name else "input_quantizer"
    return "input: in float" if module.input_quantizer is None else f"input: {own}"


def _float_row(name: str, model: nn.Module, reason: str, float_types: Mapping[str, str]) -> Row:
    module = _module(model, name)
    if module is None:
        return name, "-", "float", "-", "-", f"stays float: {reason}"
    return name, float_types.get(name, type(module).__name__), "float", "-", _size(module), f"stays float: {reason}"


def _size(module: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _counts(model: nn.Module, in_float: int) -> str:
    layers = sum(isinstance(module, QuantLayer) for module in model.modules())
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    activations = sum(quantizer.role == "activation" for quantizer in quantizers)
    learned = sum(parameter.numel() for quantizer in quantizers for parameter in quantizer.parameters())
    rest = sum(parameter.numel() for parameter in model.parameters()) - learned
    return (
        f"{plural(layers, 'quantized layer')}, {plural(activations, 'activation quantizer')},"
        f" {plural(in_float, 'layer')} in float; {rest:,} float parameters, {learned:,} quantizer parameters"
    )


class _Calls(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)


def float_results(model: nn.Module) -> list[str]:
    """Name convolutions of an unprepared model that a file computes in float.

    Integer kernels need the grid of their result, right behind the activation. A BatchNorm in between does not fold
    without `prepare`, either. In a model that cannot be traced these are all convolutions but the model itself.
    """
    if any(isinstance(module, PreparedGraph) or LEFT_IN_FLOAT in vars(module) for module in model.modules()):
        return []
    named = [name for name, module in model.named_modules() if name and is_convolution(module)]
    if not named:
        return []
    own = copy.deepcopy(model)  # tracing and its changes are not the user's
    try:
        graph_module = fx.GraphModule(own, _Calls().trace(own))
    except Exception:  # of user code that torch.fx cannot trace
        return named
    call_own_quantizers(graph_module)
    nodes = (node for node in graph_module.graph.nodes if is_convolution(submodule_of(graph_module, node)))
    return list(dict.fromkeys(str(node.target) for node in nodes if any(_float_readers(node, graph_module))))


def _float_readers(node: fx.Node, graph_module: fx.GraphModule, normalised: bool = False) -> Iterator[bool]:
    # For each reader of a result, behind norms and ReLUs: True unless it quantizes the same values.
    for reader, _ in readings(node, graph_module):
        module = submodule_of(graph_module, reader)
        if is_relu(reader, graph_module) or isinstance(module, AnyBatchNorm):
            yield from _float_readers(reader, graph_module, normalised or isinstance(module, AnyBatchNorm))
        else:
            yield reader.op != "output" and (normalised or not isinstance(module, Quantizer))


def sentence_about(names: list[str]) -> str:
    """Return a sentence about `float_results`, with the way out."""
    return (
        f"{some(names)} {'computes' if len(names) == 1 else 'compute'} in float in an exported file, since no quantizer"
        " reads the result right behind norm and activation; qat.prepare(model) keeps your layers with their ranges,"
        " and places what is missing"
    )
