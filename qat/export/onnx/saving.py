"""An ONNX file on the disk, with its large initializers beside it where one file cannot hold them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qat.atomic_write import atomic_write

MOST_BYTES = 2**31 - 2**26
"""Of initializers in one file: protobuf reads 2 GB at most, and the operators need some of them."""

LEAST_BYTES, PAGE = 1024, 4096
"""Initializers from so many bytes on go to the second file; each begins at a page, which a runtime can map."""


def save(proto: Any, path: Path, notes: dict[str, str]) -> None:
    """Check a model and write it atomically, with notes; above 2 GB its initializers go to `<file>.data` beside it.

    Two files cannot be replaced at once: where a model of two files is replaced, there is none for a moment, so that
    nobody reads the old operators with the new integers.
    """
    import onnx
    from onnx.external_data_helper import set_external_data

    onnx.helper.set_model_props(proto, notes)
    needed = onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)
    large = [tensor for tensor in proto.graph.initializer if len(tensor.raw_data) >= LEAST_BYTES]
    if sum(len(tensor.raw_data) for tensor in large) > MOST_BYTES:
        data = path.with_name(f"{path.name}.data")
        with atomic_write(data) as temporary, open(temporary, "wb") as file:
            for tensor in large:
                start = file.seek(-(-file.tell() // PAGE) * PAGE)
                set_external_data(tensor, data.name, start, file.write(tensor.raw_data))
                tensor.ClearField("raw_data")
            if data.exists():
                path.unlink(missing_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
        onnx.checker.check_model(str(temporary))


def as_json(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Each value as JSON."""
    notes = {}
    for key, value in metadata.items():
        try:
            notes[key] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"export_onnx: metadata[{key!r}] cannot be written as JSON ({error})") from None
    return notes
