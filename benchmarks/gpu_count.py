"""Kernels, bytes and waits of a step on a GPU, counted without one.

    python -m benchmarks.gpu --count resnet50 64 >> benchmarks/results/gpu_count.jsonl

The step runs on tensors without values (device "meta"): every operator that would start a kernel is seen with the
tensors that it reads and writes, every kernel in Triton with its arguments, and every read by the host. A convolution
of cuDNN counts as one. Bytes are those of the tensors in the dtypes that they have here, float32.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torchvision
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qat
from benchmarks.kept import RESULTS, kept, table
from benchmarks.speed_rows import facts_of_run
from qat.codes.evaluating import on_device
from qat.codes.evaluation.program import integer_program, merged
from qat.integers.evaluation import evaluation_copy
from qat.kernels import dispatch, plain_formulas

WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten._assert_async")
NO_KERNEL = ("aten.detach", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty")

Facts = dict[str, float]


class Count(TorchDispatchMode):
    """What is launched inside, and how often the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name in WAITS:
            self.waits[name] += 1
            if name in ("aten._local_scalar_dense", "aten.equal"):
                return True if name == "aten.equal" or args[0].dtype is torch.bool else 1.0
        out = func(*args, **(kwargs or {}))
        if name == "aten.convolution" and out.dim() == 4:  # on "meta" it forgets the memory format
            out = out.contiguous(memory_format=torch.channels_last)
        returns = func._schema.returns
        is_view = bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)
        if not is_view and name not in NO_KERNEL:
            self.note(name, tree_leaves((args, kwargs, out)))
        return out

    def note(self, name: str, given: list[Any]) -> None:
        """Count a kernel that touches these tensors, unless all lie on the host."""
        tensors = {id(x): x for x in given if isinstance(x, Tensor)}
        if any(x.is_meta for x in tensors.values()):
            self.kernels[name] += 1
            self.bytes[name] += sum(x.numel() * x.element_size() for x in tensors.values())

    @property
    def facts(self) -> Facts:
        """The totals."""
        kernels, waits = sum(self.kernels.values()), sum(self.waits.values())
        return {"kernels": kernels, "gigabytes": round(sum(self.bytes.values()) / 1e9, 2), "waits": waits}


@contextmanager
def kernels_without_values(count: Count) -> Iterator[None]:
    """A context in which "meta" is a device of Triton's kernels: they are counted, and not run."""
    from triton.runtime.jit import JITFunction

    from qat.kernels.triton import quantizers

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        name = kernel.fn.__name__
        read = [x for place, x in enumerate(args) if (name, place) != ("_settle", 1)]  # of y a value a channel
        count.note(name, [*read, *options.values()])

    found = functools.cache(lambda: quantizers)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(dispatch, "triton_kernels", found),
        mock.patch.object(dispatch, "TRITON_DEVICES", {"meta"}),
        mock.patch.object(dispatch, "operations_are_watched", lambda: False),  # who counts may watch
        mock.patch.object(qat.preparation.prepared_graph.PreparedGraph, "_is_meta_only", lambda model: False),
        mock.patch.dict(os.environ, QAT_SELF_CHECK="off"),
    ):
        yield


def counted(model: nn.Module, x: Tensor, trains: bool, kernels: bool) -> Count:
    """The second step or evaluation of a model on meta tensors; the first one sets up."""
    labels = torch.zeros(len(x), dtype=torch.long, device="meta")
    count = Count()
    model.train(trains)
    for _ in range(2):
        count = Count()
        within = kernels_without_values(count) if kernels else plain_formulas()
        with within, count, torch.set_grad_enabled(trains):
            if kernels and trains:
                model.train()  # derives the graph for this device
            found = model(x)
            if trains:
                nn.functional.cross_entropy(found, labels).backward()
        model.zero_grad(set_to_none=True)
    return count


def program_without_values(model: nn.Module) -> nn.Module:
    """The integer program of a model's evaluation, on "meta"."""
    program = integer_program(cast("fx.GraphModule", evaluation_copy(model.eval())))
    assert program is not None
    with kernels_without_values(Count()):
        return merged(on_device(program, torch.device("meta"))[0])


def count_of(name: str, batch: int, size: int = 224) -> dict[str, Any]:
    """Kernels, gigabytes and waits: of a step and an evaluation, in float, and of qat without and with its kernels."""
    torch.manual_seed(0)
    small = torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)
    x = torch.empty(batch, *small.shape[1:], device="meta").contiguous(memory_format=torch.channels_last)
    found: dict[str, dict[str, Facts]] = {"train": {}, "eval": {}}
    for kind in ("float", "operations", "kernels"):
        model = torchvision.models.get_model(name, weights=None).to(memory_format=torch.channels_last)
        if kind != "float":
            model = qat.prepare(model, example_inputs=small)
            qat.calibrate(model, [small])
        program = program_without_values(model) if kind == "kernels" else None
        model = model.to("meta")
        for mode in found:
            run = model if mode == "train" or program is None else program
            found[mode][kind] = counted(run, x, mode == "train", kind == "kernels").facts
    return {**found, "model": name, "batch": batch, "versions": facts_of_run()["versions"]}


def count_table(results: Path = RESULTS / "gpu_count.jsonl") -> str:
    """A line a model: kernels, and bytes as a share of float's, of a step and an evaluation."""
    lines = []
    for row in kept(results):
        cells = [f"{row['model']}, batch {row['batch']}"]
        for mode in ("train", "eval"):
            base = row[mode]["float"]
            cells.append(f"{base['kernels']:,}")
            for kind in ("operations", "kernels"):
                one = row[mode][kind]
                cells.append(f"{one['kernels']:,} ({one['gigabytes'] / base['gigabytes']:.2f})")
        lines.append([*cells, f"{sum(each['waits'] for each in row['train'].values())}"])
    kinds = ("float", "qat, torch's operations", "qat, kernels")
    titles = ["", *(f"{mode}: {kind}" for mode in ("step", "evaluation") for kind in kinds), "waits"]
    return table(titles, lines, 1)
