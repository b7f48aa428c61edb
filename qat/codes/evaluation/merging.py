"""`merged`: an integer program in fewer passes over memory, with the same results to the bit."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.codes.evaluation.arithmetic import MIDDLE
from qat.codes.evaluation.grids import all_values
from qat.codes.evaluation.modules import Dequantize, Join, Quantize, Table
from qat.codes.evaluation.products import Product
from qat.graph.in_place import drop_unread
from qat.graph.nodes import submodule_of


def merged(program: fx.GraphModule) -> fx.GraphModule:
    """A program whose products write what their readers want, on this processor; it shares weights with the given one.

    x * table(x) of codes x is a table. A table behind a product becomes part of it. Where all readers of a product
    multiply floats, it writes code - zero in float32, and code - 128 in int8 where they multiply such bytes.
    """
    program = fx.GraphModule(program, copy.deepcopy(program.graph))
    for node in program.graph.nodes:
        found = _gated(program, node)
        if found is not None:
            node.args = found[0]
            program.set_submodule(str(node.target), found[1])
    drop_unread(program.graph, program)
    for node in program.graph.nodes:
        step = submodule_of(program, node)
        if not isinstance(step, (Product, Join)) or step.grid is None:
            continue
        step = copy.copy(step)
        program.set_submodule(str(node.target), step)
        if isinstance(step, Join):
            step.kind = torch.int8 if _wanted(program, node) is torch.int8 else torch.uint8
            continue
        written: Tensor | None = None
        reader = next(iter(node.users))
        table = submodule_of(program, reader)
        if type(table) is Table and len(node.users) == 1:
            written = table.codes.detach()
            reader.replace_all_uses_with(node)
            program.graph.erase_node(reader)
        step.kind = _wanted(program, node)
        if written is not None and step.kind is not torch.uint8:
            source = next(each.source for each in _readers(program, node) if isinstance(each, Product))
            origin = source.zero if step.kind is torch.float32 else MIDDLE
            written = (written.float() - origin).to(step.kind)
        step.table = written
    program.delete_all_unused_submodules()
    program.recompile()
    return program


def _readers(program: fx.GraphModule, node: fx.Node) -> list[nn.Module | None]:
    return [submodule_of(program, user) for user in node.users]


def _wanted(program: fx.GraphModule, node: fx.Node) -> torch.dtype:
    """The dtype in which the readers of codes take them: what all products read, if the others take it as well."""
    readers = _readers(program, node)
    kinds = {each.reads() for each in readers if isinstance(each, Product)}
    others = [each for each in readers if not isinstance(each, Product)]
    if len(kinds) != 1 or any(not isinstance(each, (Join, Dequantize)) for each in others):
        return torch.uint8
    return kinds.pop() if not others or kinds == {torch.int8} else torch.uint8


def _gated(program: fx.GraphModule, node: fx.Node) -> tuple[tuple[fx.Node], Table] | None:
    """The codes x of a product x * table(x), and its result for each of the 256; None for another node."""
    product: Any = submodule_of(program, node)
    if type(product) is not Join or product.operation != "mul":
        return None
    ends: Any = list(zip(node.args, product.sources, strict=True))
    for (x, plain), (y, tabled) in (ends, ends[::-1]):
        table: Any = submodule_of(program, y)
        if type(table) is Table and y.args == (x,):
            values = all_values(plain) * all_values(tabled)[table.codes.cpu().long()]
            return (x,), Table(Quantize(product.grid)(values.clamp(*product.clip)).to(table.codes.device))
    return None
