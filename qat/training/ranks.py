"""Where a run computes: its device, and the process group if `torchrun` started it; without, nothing here acts."""

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from qat.collectives import rank, rank_count
from qat.kernels.cpu import processor
from qat.training.errors import UserError, value_errors_reported


def pick_device(name: str) -> torch.device:
    """Return the device `auto` (the first CUDA device, else the CPU), `cpu`, `cuda` (the first one) or `cuda:N`.

    Under torchrun, `auto` and `cuda` are the device with the rank's local number; one number is not for many ranks.
    """
    with value_errors_reported():
        processor.asked_for()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if is_launched() and count and name.startswith("cuda:") and ranks_here() > 1:
        raise UserError(f"device: {name!r} is one device, and torchrun started {ranks_here()} ranks here; use cuda")
    if is_launched() and count and name in ("auto", "cuda"):
        name = f"cuda:{os.environ['LOCAL_RANK']}"
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


T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in a collective. One that ends is noticed at once, by its connection."""

RUN_DIR, FAILED = "qat/run_dir", "qat/failed"  # keys of what ranks leave in the store of torchrun's agent
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # the variable in which torchrun says how often it has started the ranks anew


def is_launched() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def ranks_here() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else 1


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the ranks that torchrun started, and leave them at the end; an error ends the process, and so the group."""
    if not is_launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # With CUDA, Python objects and flags still go through Gloo: the device need not be waited for.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    shared, number, count = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))  # type: ignore[attr-defined]
    # The store still has the addresses of ranks that were started before these; Gloo would wait for them for ever.
    store = dist.PrefixStore(f"qat/{os.environ[RESTARTS]}", shared)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=number, world_size=count)
    yield
    leave()


def leave() -> None:
    """Leave the group: this rank goes on alone, or ends."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # none of the others still needs an answer
        dist.destroy_process_group()


@contextmanager
def first_rank_first() -> Iterator[None]:
    """The block runs on a machine's first rank, then on its others, which find what it has downloaded."""
    waits = rank_count() > 1 and os.environ["LOCAL_RANK"] != "0"
    if waits:
        dist.barrier()
    yield
    if rank_count() > 1 and not waits:
        dist.barrier()


def from_first(mine: T | None) -> T:
    """What rank 0 gives, on all ranks; the others' values are ignored."""
    given: list[Any] = [mine]
    if rank_count() > 1:
        dist.broadcast_object_list(given, src=0)
    return cast(T, mine if rank() == 0 else given[0])  # rank 0's own object: a lock is good where it was taken only


@torch.no_grad()
def share_state(model: nn.Module) -> None:
    """Give the model of every rank the parameters and buffers that rank 0's has."""
    if rank_count() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.contiguous()
            dist.broadcast(dense, 0)
            if dense is not tensor:  # channels_last
                tensor.copy_(dense)


def remembered_folder() -> str | None:
    """The run folder of this run's ranks before torchrun started them anew; None if they had none yet."""
    store = _agent_store() if is_launched() and int(os.environ[RESTARTS]) else None
    return store.get(RUN_DIR).decode() if store and store.check([RUN_DIR]) else None


def remember_folder(path: str) -> None:
    """Tell it to the ranks that torchrun may start after these."""
    if is_launched() and rank() == 0:
        _agent_store().set(RUN_DIR, path)


def is_first_to_fail() -> bool:
    """Whether no other rank has reported an error; what follows on the others is not worth a sentence."""
    if not is_launched():
        return True
    try:
        return bool(_agent_store().add(f"{FAILED}/{os.environ[RESTARTS]}", 1) == 1)
    except dist.DistError:  # the agent that keeps the store has ended
        return os.environ["RANK"] == "0"


def _agent_store() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
