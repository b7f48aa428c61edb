"""Facts of a .tflite file for firmware: bytes as C, multipliers, memory."""

import csv
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from qat.export.litert.engines import open_micro
from qat.export.litert.file import ReadFile

COLUMNS = ("layer", "operator", "channel", "multiplier", "shift", "input_zero_point", "output_zero_point")


def quantized_multiplier(real: float) -> tuple[int, int]:
    """Return multiplier (31 bits) and shift: real ~ multiplier * 2**(shift - 31).

    >>> quantized_multiplier(0.75), quantized_multiplier(1.0)
    ((1610612736, 0), (1073741824, 1))
    """
    fraction, shift = math.frexp(real)
    multiplier = math.floor(fraction * 2**31 + 0.5)
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift + 1
    return (multiplier, shift) if shift >= -31 else (0, 0)


def write_multipliers(data: bytes, path: Path) -> None:
    """Write the factors with which kernels bring int32 sums to int8, as CSV.

    int8 = sum * multiplier * 2**(shift - 31) + output_zero_point, a row for every channel of the convolutions and
    linear layers, in the order in which they run; multiplier and shift are `QuantizeMultiplier`'s of TensorFlow Lite,
    for input_scale * weight_scale / output_scale.
    """
    file = ReadFile(data)
    rows: list[tuple[str | int, ...]] = [COLUMNS]
    for kind, each in file.operators():
        if kind not in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            continue
        weight = file.tensors[each.inputs[1]]
        if weight.quantization is None:  # in float
            continue
        grids = [file.tensors[number].quantization for number in (each.inputs[0], each.outputs[0])]
        zero_points = [int(grid.zeroPoint[0]) for grid in grids]
        scales, channels = weight.quantization.scale.tolist(), weight.shape[weight.quantization.quantizedDimension]
        for channel, scale in enumerate(scales * (channels // len(scales))):
            real = float(grids[0].scale[0]) * scale / float(grids[1].scale[0])
            rows.append((weight.name.decode(), kind, channel, *quantized_multiplier(real), *zero_points))
    with path.open("w", newline="") as table:
        csv.writer(table).writerows(rows)


def arena_bytes(data: bytes) -> int:
    """Return the bytes that TensorFlow Lite Micro takes here, with 64-bit pointers."""
    made = open_micro(data)
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # the interpreter has no call for the number: it prints it from C
        try:
            made.print_allocations()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return int(re.findall(rb"Arena allocation total (\d+) bytes", file.read())[0])


def write_c_array(data: bytes, path: Path) -> str:
    """Write path.c and path.h, and return the array's name; its length is in NAME_len.

    The name is that of `xxd -i`: model_tflite for model.tflite.
    """
    name = re.sub(r"\W|^(?=\d)", "_", f"{path.stem}_tflite", flags=re.ASCII)
    declared = f"extern const unsigned char {name}[];\nextern const unsigned int {name}_len;\n"
    guarded = f'#pragma once\n#ifdef __cplusplus\nextern "C" {{\n#endif\n{declared}#ifdef __cplusplus\n}}\n#endif\n'
    path.with_suffix(".h").write_text(guarded)
    lines = (", ".join(map(str, data[at : at + 16])) for at in range(0, len(data), 16))
    body = ",\n    ".join(lines)
    head = f'#include <stdalign.h>\n#include "{path.stem}.h"\n\nalignas(16) const unsigned char {name}[] = {{'
    path.with_suffix(".c").write_text(f"{head}\n    {body}\n}};\nconst unsigned int {name}_len = {len(data)};\n")
    return name


def vela_estimate(path: Path, accelerator: str) -> dict[str, float]:
    """Estimate cycles of an inference, and KiB of SRAM and flash, by Arm's compiler.

    Raises:
        ValueError: with the compiler's last line, if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="qat_vela_") as folder:
        command = [sys.executable, "-m", "ethosu.vela", "--accelerator-config", accelerator, "--output-dir", folder]
        done = subprocess.run([*command, str(path.absolute())], capture_output=True, text=True)
        summaries = list(Path(folder).glob("*_summary_*.csv"))
        if done.returncode or not summaries:
            last = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-1]
            raise ValueError(f"{last} (vela)")
        (row,) = csv.DictReader(summaries[0].read_text().splitlines())
    columns = {"cycles": "cycles_total", "SRAM": "sram_memory_used", "flash": "off_chip_flash_memory_used"}
    return {key: float(row[column]) for key, column in columns.items()}
