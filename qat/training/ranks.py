"""Device of a run, and its process group if `torchrun` started it."""

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

from qat.collectives import rank, rank_count
from qat.kernels.cpu import processor
from qat.training.errors import UserError, value_errors_reported


def pick_device(name: str) -> torch.device:
    """Return the device that the config names.

    It is `auto` (the first CUDA device, else the CPU), `cpu`, `cuda` (the first one) or `cuda:N`. Under torchrun,
    `auto` and `cuda` are the device with the rank's local number; `cuda:N` is refused for many ranks.
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
    torch.manual_seed(seed)
    random.seed(seed)  # users' code may draw from this and NumPy's
    np.random.seed(seed % 2**32)


T = TypeVar("T")

PATIENCE = timedelta(minutes=30)  # of a rank in a collective; one that ends is noticed at once, by its connection
RUN_DIR, FAILED = "qat/run_dir", "qat/failed"  # keys in the store of torchrun's agent
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun: how often it has started the ranks anew


def is_launched() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def ranks_here() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else 1


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the ranks that torchrun started, and leave them at the end."""
    if not is_launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # With CUDA, Python objects and flags still go through Gloo, without waiting for the device.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    shared, number, count = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))  # type: ignore[attr-defined]
    # The store still has the addresses of ranks from before a restart; Gloo would wait for them for ever.
    store = dist.PrefixStore(f"qat/{os.environ[RESTARTS]}", shared)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=number, world_size=count)
    yield
    leave()


def leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # others may still need an answer
        dist.destroy_process_group()


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the block on a machine's first rank, then on others, which find downloads."""
    waits = rank_count() > 1 and os.environ["LOCAL_RANK"] != "0"
    if waits:
        dist.barrier()
    yield
    if rank_count() > 1 and not waits:
        dist.barrier()


def from_first(mine: T | None) -> T:
    """Return rank 0's value on all ranks; the others' values are ignored."""
    given: list[T | None] = [mine]
    if rank_count() > 1:
        dist.broadcast_object_list(given, src=0)
    return cast(T, mine if rank() == 0 else given[0])  # rank 0 keeps its own object: a copy of a lock holds nothing


def remembered_folder() -> str | None:
    """Return the run folder that the ranks had before torchrun restarted them."""
    store = _agent_store() if is_launched() and int(os.environ[RESTARTS]) else None
    return store.get(RUN_DIR).decode() if store and store.check([RUN_DIR]) else None


def remember_folder(path: str) -> None:
    """Keep the run folder for the ranks that torchrun may start after these."""
    if is_launched() and rank() == 0:
        _agent_store().set(RUN_DIR, path)


def is_first_to_fail() -> bool:
    """Return True if no other rank has reported an error."""
    if not is_launched():
        return True
    try:
        # Ranks count in the store: others fail because of the first, which alone is worth a sentence.
        return bool(_agent_store().add(f"{FAILED}/{os.environ[RESTARTS]}", 1) == 1)
    except dist.DistError:  # the agent that keeps the store has ended
        return os.environ["RANK"] == "0"


def _agent_store() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
