"""The contents of a .tflite file: `ModelFile` writes them, `ReadFile` reads them."""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qat.integers.frozen import IntegerGrid

Array = npt.NDArray[Any]
Option: TypeAlias = bool | int | float | str | Sequence[int]
Channels = tuple[Sequence[float], int]
"""Scales of the channels of a constant, and their axis; the zero points are 0."""

ALIGNMENT = 16
"""Bytes to whose multiples kernels expect constants to be aligned."""

VERSIONS = {
    "CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "HARD_SWISH": 1, "RESHAPE": 1,
    "RESIZE_BILINEAR": 3, "RESIZE_NEAREST_NEIGHBOR": 3, "SUB": 3, "TRANSPOSE_CONV": 3,
}  # fmt: skip
"""Version of an operator that has all that is used here, where it is not the second."""

OPTIONS = {
    "AVERAGEPOOL2D": "POOL2D", "MAXPOOL2D": "POOL2D", "MAXIMUM": "MAXIMUMMINIMUM", "MINIMUM": "MAXIMUMMINIMUM",
    "MEAN": "REDUCER",
}  # fmt: skip
"""Names of options in the schema, where they are not those of the operator."""

LOWEST, HIGHEST = -128, 127


class Grid(IntegerGrid):
    """Integers of int8; fewer than 256 end at 127, where int8 saturates."""

    @classmethod
    def of(cls, scale: Tensor, zero_point: Tensor, low: Tensor | None, high: Tensor | None) -> "Grid":
        """Return the grid of a frozen quantizer, whatever type its integers are stored in."""
        limits = torch.iinfo(zero_point.dtype)
        first, last = (limits.min, limits.max) if low is None or high is None else (int(low), int(high))
        shift = HIGHEST - last  # from uint8, or from fewer bits that end below 127
        return cls(float(scale), int(zero_point) + shift, first + shift, HIGHEST)

    def has_level(self, bound: float) -> bool:
        """Return True if a bound of values lies on a level, or beyond all levels."""
        level = bound / self.scale + self.zero_point
        return not self.qmin < level < self.qmax or abs(level - round(level)) < 1e-4  # scales are float32

    def fused(self, low: int, high: int) -> tuple[str, int, int]:
        """Return the tightest fused activation that keeps low .. high, and its bounds."""
        best = ("NONE", LOWEST, HIGHEST)
        for name, first, last in (("RELU", self.zero_point, HIGHEST), ("RELU6", self.zero_point, self.code(6.0))):
            if best[1] <= first <= low and high <= last <= best[2] and (first, last) != best[1:]:
                best = (name, first, last)
        return best


FLOAT = Grid(0.0, 0, LOWEST, HIGHEST)
"""No grid: float32, for results that no quantizer follows."""


class ModelFile:
    """A file that is being written."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema: Any = schema
        self.shapes: list[tuple[int, ...]] = []
        self._options = {name.upper(): name for name in vars(schema.BuiltinOptions)}
        self.tensors: list[Any] = []
        self._graph = schema.SubGraphT(name="main", tensors=self.tensors, operators=[])
        self._buffers: list[Any] = [schema.BufferT()]  # the schema reserves the first, for tensors without values
        self._codes: dict[str, int] = {}
        self._constants: dict[tuple[object, ...], int] = {}

    def tensor(
        self, name: str, shape: Sequence[int], kind: str, grid: Grid | None = None, channels: Channels | None = None
    ) -> int:
        """Add a tensor, on a grid or on one for each channel, and return its number."""
        if grid is FLOAT:
            kind, grid = "FLOAT32", None
        sizes = tuple(map(int, shape))
        quantization = None
        if grid is not None or channels is not None:
            scales, axis = channels or ([grid.scale if grid else 0.0], 0)
            zero_points = [grid.zero_point if grid else 0] * len(scales)
            quantization = self.schema.QuantizationParametersT(
                scale=[*map(float, scales)], zeroPoint=zero_points, quantizedDimension=axis
            )
        number = getattr(self.schema.TensorType, kind)
        self.tensors.append(self.schema.TensorT([*sizes], number, name=name, quantization=quantization))
        self.shapes.append(sizes)
        return len(self.shapes) - 1

    def constant(
        self, name: str, values: Array, grid: Grid | None = None, channels: Channels | None = None, packed: bool = False
    ) -> int:
        """Add a tensor with values and return its number; equal ones are stored once."""
        key = (values.tobytes(), values.shape, values.dtype, grid, None if channels is None else str(channels), packed)
        if key not in self._constants:
            kind = "INT4" if packed else values.dtype.name.upper()
            number = self._constants[key] = self.tensor(name, values.shape, kind, grid, channels)
            self.tensors[number].buffer = self._buffer(_in_nibbles(values) if packed else values)
        return self._constants[key]

    def operator(self, kind: str, inputs: Sequence[int], outputs: Sequence[int], **options: Option) -> None:
        """Add an operator, with options by their names in the schema."""
        made = self.schema.OperatorT(self._codes.setdefault(kind, len(self._codes)), [*inputs], [*outputs])
        name = kind.replace("_", "")
        if name := self._options.get(f"{OPTIONS.get(name, name)}OPTIONS", ""):  # LOGISTIC and TANH have none
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, name)
            made.builtinOptions = getattr(self.schema, f"{name}T")(**options)
        self._graph.operators.append(made)

    def in_float(self, tensor: int) -> int:
        """Return the tensor in float32; one without a grid is returned as it is."""
        if self.tensors[tensor].quantization is None:
            return tensor
        made = self.tensor(f"floats_{len(self.shapes)}", self.shapes[tensor], "FLOAT32")
        self.operator("DEQUANTIZE", [tensor], [made])
        return made

    def packed(self, inputs: Mapping[str, int], outputs: Mapping[str, int], notes: Mapping[str, object]) -> bytes:
        """Return the file with these named inputs and outputs, and notes as JSON metadata."""
        schema, builtin = self.schema, self.schema.BuiltinOperator
        self._graph.inputs, self._graph.outputs = [*inputs.values()], [*outputs.values()]
        ends = ([schema.TensorMapT(*each) for each in named.items()] for named in (inputs, outputs))
        most, numbers = builtin.PLACEHOLDER_FOR_GREATER_OP_CODES, {each: getattr(builtin, each) for each in self._codes}
        # Old readers know the first 127 operators, in a field of 8 bits.
        codes = [schema.OperatorCodeT(min(n, most), None, VERSIONS.get(each, 2), n) for each, n in numbers.items()]
        texts = {key: np.frombuffer(json.dumps(value).encode(), np.uint8) for key, value in notes.items()}
        noted = [schema.MetadataT(key, self._buffer(text)) for key, text in texts.items()]
        model = schema.ModelT(
            3, codes, [self._graph], "qat", self._buffers, metadata=noted,
            signatureDefs=[schema.SignatureDefT(*ends, signatureKey="serving_default")],
        )  # fmt: skip
        return _in_bytes(model)

    def _buffer(self, values: Array) -> int:
        class Aligned(self.schema.BufferT):  # type: ignore[misc, name-defined]
            # The schema's class packs bytes without regard to their alignment.

            def Pack(self, builder: Any) -> Any:  # noqa: N802 - the schema's name
                builder.Prep(ALIGNMENT, len(self.data))
                return super().Pack(builder)

        self._buffers.append(Aligned(np.frombuffer(values.tobytes(), np.uint8)))
        return len(self._buffers) - 1


def _in_nibbles(values: Array) -> Array:  # two integers in a byte, the first in its lower half
    flat = values.reshape(-1).astype(np.uint8) & 15
    flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
    return flat[::2] | flat[1::2] << 4


def _in_bytes(model: Any) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(4096)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def require_litert(caller: str) -> None:
    """Raise an ImportError that says how to install ai-edge-litert if it is missing."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ImportError(f"{caller}: ai-edge-litert is not installed; pip install ste-qat[litert]")


class ReadFile:
    """First graph of a file: its tensors, their names, its inputs, outputs and notes."""

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
        """Yield the name and object of every operator, in order."""
        for each in self._graph.operators:
            yield self._kinds[self._model.operatorCodes[each.opcodeIndex].builtinCode], each

    def notes(self) -> dict[str, Any]:
        """Return the metadata that is JSON."""
        found = {}
        for note in self._model.metadata or []:
            try:
                found[note.name.decode()] = json.loads(bytes(self._model.buffers[note.buffer].data))
            except (ValueError, TypeError):  # other tools' own
                continue
        return found

    def with_outputs(self, names: Sequence[str]) -> bytes:
        """Return the file with these tensors as its outputs, in this order."""
        self._graph.outputs, self._model.signatureDefs = [self.names.index(name) for name in names], []
        return _in_bytes(self._model)
