"""The device of a run, its random seeds and its precision."""

import random
import re
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from qat.kernels.cpu import processor
from qat.training.errors import UserError, value_errors_reported


def pick_device(name: str) -> torch.device:
    """Return the device `auto` (the first CUDA device, else the CPU), `cpu`, `cuda` (the first one) or `cuda:N`."""
    with value_errors_reported():
        processor.asked_for()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if match is None:
        raise UserError(f"device: {name!r} is not a device; choose auto, cpu, cuda or cuda:<number>")
    if count == 0:
        raise UserError(f"device: {name!r} needs a CUDA device and torch sees none; choose auto or cpu")
    index = int(match.group(1) or 0)
    if index >= count:
        raise UserError(f"device: {name!r} is not there; torch sees {count}: cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def seed_everything(seed: int) -> None:
    """Seed torch on every device, and the global generators of Python and NumPy, which users' code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def check_graphs(device: torch.device, cuda_graphs: str | bool) -> None:
    """Raise a UserError if CUDA graphs are asked for and the device has none."""
    if cuda_graphs is True and device.type != "cuda":
        raise UserError(f"cuda_graphs: true needs a CUDA device; on device {device.type!r} leave it out")


def autocast(device: torch.device, amp: str) -> AbstractContextManager[object]:
    """Return a context in which operations on a device run in mixed precision: `none`, `bf16` or `fp16`."""
    if amp == "none":
        return nullcontext()
    if amp == "fp16" and device.type != "cuda":
        raise UserError(f"amp: 'fp16' needs a CUDA device; on device {device.type!r} use 'bf16' or 'none'")
    # A graph cannot be recorded with the cache, which only a float weight that is read twice would use.
    return torch.autocast(
        device.type, dtype=torch.bfloat16 if amp == "bf16" else torch.float16, cache_enabled=device.type != "cuda"
    )
