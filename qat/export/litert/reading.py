"""`ReadFile`: a .tflite file of any tool, read back as the objects of the schema."""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from typing import Any


def require_litert(caller: str) -> None:
    """Raise an ImportError that says what to install."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ImportError(f"{caller}: ai-edge-litert is not installed; pip install ste-qat[litert]")


class ReadFile:
    """The first graph of a file: its tensors, their names, its ends, and what is noted in it."""

    def __init__(self, data: bytes) -> None:
        require_litert("a .tflite file")
        from ai_edge_litert import schema_py_generated as schema

        if not schema.Model.ModelBufferHasIdentifier(data, 0):
            raise ValueError("it is no .tflite file; qat.export_litert writes one")
        self._model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data))
        self._graph = self._model.subgraphs[0]
        self._kinds = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
        self.tensors: list[Any] = self._graph.tensors
        self.names = [tensor.name.decode() for tensor in self.tensors]
        self.inputs = [self.tensors[number] for number in self._graph.inputs]
        named = {end.tensorIndex: end.name.decode() for each in self._model.signatureDefs or () for end in each.inputs}
        self.input_names = [named.get(number, self.names[number]) for number in self._graph.inputs]
        self.outputs = [self.tensors[number] for number in self._graph.outputs]

    def operators(self) -> Iterator[tuple[str, Any]]:
        """Name and object of every operator, in order."""
        for each in self._graph.operators:
            yield self._kinds[self._model.operatorCodes[each.opcodeIndex].builtinCode], each

    def notes(self) -> dict[str, Any]:
        """The metadata that is JSON."""
        found = {}
        for note in self._model.metadata or []:
            try:
                found[note.name.decode()] = json.loads(bytes(self._model.buffers[note.buffer].data))
            except (ValueError, TypeError):  # other tools' own
                continue
        return found

    def with_outputs(self, names: Sequence[str]) -> bytes:
        """The file with these tensors as its outputs, in this order."""
        import flatbuffers

        self._graph.outputs, self._model.signatureDefs = [self.names.index(name) for name in names], []
        builder = flatbuffers.Builder(4096)
        builder.Finish(self._model.Pack(builder), b"TFL3")
        return bytes(builder.Output())
