"""Every weight in an ONNX file gets initializers of its own."""

from typing import Any


def own_initializers(proto: Any) -> None:
    """Give every operator that reads a weight its own DequantizeLinear, integers and zero point.

    The exporter stores equal tensors once and computes equal nodes once. With `session.x64quantprecision=1` ONNX
    Runtime converts every weight to uint8, and names the result after the initializer that it converts. Where two
    weights share an initializer, the second one cannot be converted, and ONNX Runtime refuses the file ("Attempt to
    replace the existing tensor"). So a small layer that is called twice has its weight in the file twice, which is the
    case for a large one anyway.
    """
    stored = {tensor.name for tensor in proto.graph.initializer}
    taken: set[str] = set()
    nodes = []
    for node in proto.graph.node:
        nodes.append(node)
        if node.op_type != "DequantizeLinear" or node.input[0] not in stored:
            continue
        for number, copy in enumerate(_one_for_each_reader(proto, node)):
            nodes += [copy] if number else []
            for place in (0, 2):
                if place < len(copy.input):
                    copy.input[place] = _own(proto, copy.input[place], taken)
    ordered = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(ordered)


def _one_for_each_reader(proto: Any, node: Any) -> list[Any]:
    """The node for its first reader, and a copy for every further one."""
    readers = [reader for reader in proto.graph.node if node.output[0] in reader.input]
    copies = [node]
    for number, reader in enumerate(readers[1:], 1):
        copy = type(node).FromString(node.SerializeToString())
        copy.name, copy.output[0] = f"{node.name}.{number}", f"{node.output[0]}.{number}"
        reader.input[:] = [copy.output[0] if name == node.output[0] else name for name in reader.input]
        copies.append(copy)
    return copies


def _own(proto: Any, name: str, taken: set[str]) -> str:
    """The initializer's name if this is its first reader, else the name of a new copy."""
    if name not in taken:
        taken.add(name)
        return name
    number = next(number for number in range(1, len(taken) + 2) if f"{name}.{number}" not in taken)
    original = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    proto.graph.initializer.add().CopyFrom(original)
    proto.graph.initializer[-1].name = f"{name}.{number}"
    taken.add(f"{name}.{number}")
    return f"{name}.{number}"
