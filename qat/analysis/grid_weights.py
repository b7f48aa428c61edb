"""The weights of a model on integer grids, each read and written as rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.collectives import is_sharded
from qat.layers import QuantFunction, QuantLayer
from qat.layers.twins import CompositeTwin
from qat.quantizer import Quantizer
from qat.quantizer.granularity import from_groups, to_groups


@dataclass(frozen=True)
class GridWeight:
    """A weight with integers clamp(round(weight / scale) + zero_point, qmin, qmax)."""

    layer: QuantLayer
    read: Callable[[], Tensor]

    @property
    def is_known(self) -> bool:
        """False for a function outside of a graph, whose weight only its caller knows."""
        return self.read is not _unknown

    @property
    def quantizer(self) -> Quantizer:
        """Quantizer of the weight."""
        return self.layer.weight_quantizer

    def rows(self) -> Tensor:
        """Return the weight as its quantizer sees it: output channels first, in groups."""
        return to_groups(self.layer.channels_first(self.read()), self.quantizer.spec)

    @torch.no_grad()
    def codes(self) -> Tensor:
        """Return the integers of `rows`, as floats."""
        return self.quantizer.compute_codes(self.rows())

    @torch.no_grad()
    def values(self, codes: Tensor) -> Tensor:
        """Return (codes - zero_point) * scale."""
        scale, zero_point = self.quantizer.grid(self.rows())
        return (codes - zero_point) * scale

    @torch.no_grad()
    def write(self, rows: Tensor) -> None:
        """Replace the weight in place."""
        self.read().copy_(self.layer.torch_layout(from_groups(rows, self.quantizer.spec)))


def grid_weights(model: nn.Module, most_bits: int) -> tuple[dict[str, GridWeight], dict[str, str]]:
    """Return weights on grids of `most_bits` or fewer, each once; reasons of others."""
    # A view of a parameter, such as a chunk of in_proj_weight, can be written as well.
    owned = {each.untyped_storage().data_ptr() for each in model.parameters() if not is_sharded(each)}
    found, left_out, first = dict[str, GridWeight](), dict[str, str](), dict[tuple[int, int], str]()
    for name, each in weights_of(model):
        weight = each.read() if each.is_known else None
        reason = _refusal(each.quantizer, most_bits)
        if reason is None and weight is not None and is_sharded(weight):
            reason = "is sharded over the ranks"
        if reason is None and (weight is None or weight.untyped_storage().data_ptr() not in owned):
            reason = "is computed from other tensors"
        if reason is None and weight is not None:
            other = first.setdefault((weight.untyped_storage().data_ptr(), int(weight.storage_offset())), name)
            reason = None if other == name else f"is that of {other!r} too, on another grid"
        if reason is None:
            found[name] = each
        else:
            left_out[name] = reason
    return found, left_out


def _refusal(quantizer: Quantizer, most_bits: int) -> str | None:
    # A weight needs an integer that stays while the weight and the parameters of its grid do.
    kind, rule = type(quantizer), quantizer.spec.rule
    if not quantizer.exportable:
        return f"has the rule {rule!r}, whose values lie on no integer grid"
    if not quantizer.uniform or kind.compute_codes is not Quantizer.compute_codes:
        return f"has the rule {rule!r}, whose integers are not those of weight / scale"
    if kind.follow is not Quantizer.follow:
        return f"has the rule {rule!r}, whose range follows the weights"
    if quantizer.spec.bits > most_bits:
        return f"has {quantizer.spec.bits} bits, more than most_bits={most_bits}"
    return None


def _unknown() -> Tensor:
    raise TypeError("GridWeight: the weight of this function is not known")


def weights_of(model: nn.Module) -> Iterator[tuple[str, GridWeight]]:
    """Yield every weight that has a quantizer, with the name of its layer."""
    seen = set[int]()
    for name, module in model.named_modules():
        inner: dict[str, Callable[[], Tensor]] = {}
        if isinstance(module, QuantLayer) and not isinstance(module, QuantFunction):
            inner = {"": partial(getattr, module, "weight")}
        elif isinstance(module, CompositeTwin):
            inner = {key: partial(_inner_weight, module, key) for key in module.inner_weights()}
        elif isinstance(module, fx.GraphModule):
            inner = _of_functions(module)
        elif isinstance(module, QuantFunction) and id(module) not in seen:
            inner = {"": _unknown}
        for key, read in inner.items():
            layer = module.get_submodule(key)
            assert isinstance(layer, QuantLayer)
            seen.add(id(layer))
            yield ".".join(part for part in (name, key) if part), GridWeight(layer, read)


def _inner_weight(owner: CompositeTwin, key: str) -> Tensor:
    return owner.inner_weights()[key][0]


def _of_functions(graph: fx.GraphModule) -> dict[str, Callable[[], Tensor]]:
    # The weight that a function reads is known if it follows from the model alone.
    found: dict[str, Callable[[], Tensor]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), QuantFunction):
            found[str(node.target)] = partial(_value, graph, node.args[1]) if _is_constant(node.args[1]) else _unknown
    return found


def _is_constant(node: object) -> bool:
    # True if a value follows from attributes by functions alone, as `in_proj_weight.chunk(3)[0]` does.
    if not isinstance(node, fx.Node):
        return True
    return node.op == "get_attr" or (
        node.op in ("call_function", "call_method") and all(map(_is_constant, node.all_input_nodes))
    )


def _value(graph: fx.GraphModule, node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        owner, _, key = str(node.target).rpartition(".")
        return getattr(graph.get_submodule(owner), key)
    args, options = fx.node.map_arg((node.args, node.kwargs), partial(_value, graph))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **options)
    return node.target(*args, **options)  # type: ignore[operator]
