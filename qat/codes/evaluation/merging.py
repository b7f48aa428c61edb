"""`merged`: an integer program in fewer passes over memory, with the same results to the bit."""

import copy
from typing import Any

from torch import Tensor, fx

from qat.codes.evaluation.grids import all_values
from qat.codes.evaluation.modules import Join, Quantize, Table
from qat.codes.evaluation.products import Product
from qat.graph.in_place import drop_unread
from qat.graph.nodes import submodule_of


def merged(program: fx.GraphModule) -> fx.GraphModule:
    """A program whose products write what their readers want, on this processor; it shares weights with the given one.

    x * table(x) of codes x is a table. A table behind a product becomes part of it. Where all readers of a product
    multiply floats, it writes code - zero in float32, and not codes.
    """
    program = fx.GraphModule(program, copy.deepcopy(program.graph))
    for node in program.graph.nodes:
        found = _gated(program, node)
        if found is not None:
            node.args = found[0]
            program.set_submodule(str(node.target), found[1])
    drop_unread(program.graph, program)
    for node in program.graph.nodes:
        product = submodule_of(program, node)
        if type(product) is not Product or product.grid is None:
            continue
        product = copy.copy(product)
        program.set_submodule(str(node.target), product)
        written: Tensor | None = None
        reader = next(iter(node.users))
        table = submodule_of(program, reader)
        if type(table) is Table and len(node.users) == 1:
            written = table.codes.detach()
            reader.replace_all_uses_with(node)
            program.graph.erase_node(reader)
        readers: list[Any] = [submodule_of(program, user) for user in node.users]
        if all(type(each) is Product and not each.multiplies_integers() for each in readers):
            product.centered = written is None
            written = None if written is None else written.float() - readers[0].source.zero
        product.table = written
    program.delete_all_unused_submodules()
    program.recompile()
    return program


def _gated(program: fx.GraphModule, node: fx.Node) -> tuple[tuple[fx.Node], Table] | None:
    """The codes x of a product x * table(x), and its result for each of the 256; None for another node."""
    product: Any = submodule_of(program, node)
    if type(product) is not Join or product.kind != "mul":
        return None
    ends: Any = list(zip(node.args, product.sources, strict=True))
    for (x, plain), (y, tabled) in (ends, ends[::-1]):
        table: Any = submodule_of(program, y)
        if type(table) is Table and y.args == (x,):
            values = all_values(plain) * all_values(tabled)[table.codes.long()]
            return (x,), Table(Quantize(product.grid)(values.clamp(*product.clip)))
    return None
