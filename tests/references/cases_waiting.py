"""Operations that wait for the device, and a mode in which they fail."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2")


class Watch(TorchDispatchMode):
    """Fails where a value would have to come from the device, and where an argument is written to."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.storages = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{name} waits for the device"
        if name.startswith("index"):  # counts what is True
            for each in args[1]:
                assert each is None or each.dtype not in (torch.bool, torch.uint8), f"{name} waits for the device"
        for each, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                assert each.untyped_storage().data_ptr() not in self.storages, f"{name} writes to an argument"
        self.seen += 1
        return func(*args, **(kwargs or {}))
