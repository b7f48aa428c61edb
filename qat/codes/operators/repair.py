"""Resets learned scales that an optimizer made NaN or infinite, all at once."""

import ctypes

import torch
from torch import Tensor

from qat.kernels import passes_values
from qat.kernels.cpu.addresses import numbers_at
from qat.kernels.cpu.compiler import library
from qat.kernels.cpu.quantizers import compiled, is_plain
from qat.quantizer import Quantizer
from qat.quantizer.base import FLOOR_SHARE
from qat.torch_internals import copy_each


def repair(*quantizers: Quantizer) -> None:
    """Repair the quantizers that train and do not observe."""
    ready = [each for each in quantizers if each.training and each.observer is None]
    if not torch.compiler.is_compiling():
        if ready and passes_values(ready[0].scale):
            scales, least = [each.scale.data for each in ready], [each.smallest_scale for each in ready]
            values = torch.cat([each.flatten() for each in scales])  # few launches, and no wait for the device
            values = torch.where(values.isfinite(), values, torch.cat([each.flatten() for each in least]) / FLOOR_SHARE)
            pieces = torch.split(values, [each.numel() for each in scales])
            copy_each(scales, [piece.view_as(each) for piece, each in zip(pieces, scales, strict=True)])
        elif not all_finite([each.scale.detach() for each in ready]):
            for each in ready:
                each.repair()
    elif ready:
        _put_back([each.scale for each in ready], [each.smallest_scale for each in ready])


@torch.library.custom_op("qat::put_back", mutates_args=("scales",))
def _put_back(scales: list[Tensor], smallest: list[Tensor]) -> None:
    # One operator: compiled code cannot branch on values, and would keep copies of scales.
    if not all_finite(scales):
        for scale, least in zip(scales, smallest, strict=True):
            scale.copy_(torch.where(scale.isfinite(), scale, least / FLOOR_SHARE))


def all_finite(tensors: list[Tensor]) -> bool:
    """Return True if no tensor holds a NaN or an infinity."""
    if library() is None or not all(is_plain(each) and each.is_contiguous() for each in tensors):
        return all(bool(each.isfinite().all()) for each in tensors)
    count = len(tensors)
    addresses = (ctypes.c_void_p * count)(*[numbers_at("scale", each, each.numel()) for each in tensors])
    sizes = (ctypes.c_int64 * count)(*[each.numel() for each in tensors])
    return bool(compiled().all_finite(addresses, sizes, count))
