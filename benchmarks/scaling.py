"""What data-parallel training exchanges in a step, counted and not measured: gradients, buffers, SyncBatchNorm.

python -m benchmarks.scaling                 # keeps results/scaling.json
python -m benchmarks.document                # writes the tables into docs/speed.md
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import qat
from benchmarks.speed_rows import facts_of_run
from benchmarks.speed_table import conditions_of
from qat.quantizer import Quantizer

OUT = Path(__file__).resolve().parent / "results" / "scaling.json"
MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16")
MIB = 2**20
FIRST_BUCKET, BUCKET = MIB, 25 * MIB
"""Bytes from which torch's DistributedDataParallel sends a bucket: the first is small, so that sending begins early."""

MACHINE = 8
NVLINK, NETWORK = 450e9, 25e9
"""Bytes a second of a GPU in each direction: NVLink 4 as its data sheet has it (900 GB/s both ways); 200 Gbit/s."""

BASE, HOP, FAR_HOP = 6.6e-6, 0.6e-6, 2.7e-6
"""Seconds of a small collective by ring, as NCCL's src/graph/tuning.cc plans with (protocol LL): its start, a hop by
NVLink, a hop by network."""


def buckets_of(sizes: Iterable[int]) -> list[int]:
    """Bytes of DDP's buckets, from the bytes of the gradients in the order in which the backward finds them."""
    found = [0]
    for size in sizes:
        if found[-1] >= (FIRST_BUCKET if len(found) == 1 else BUCKET):
            found.append(0)
        found[-1] += size
    return found


def ring_bytes(count: int, ranks: int) -> float:
    """What each rank sends in an all-reduce by ring."""
    return 2 * (ranks - 1) / ranks * count


def latency(turns: int, ranks: int) -> float:
    """Seconds of a collective without its bytes; turns round the ring: 1 to gather, 2 to reduce."""
    far = ranks // MACHINE - 1
    return BASE + turns * ((ranks - 1 - far) * HOP + far * FAR_HOP)


def counted(name: str) -> dict[str, Any]:
    """The numbers of a model, float and prepared by the default recipe."""
    floating = torchvision.models.get_model(name, weights=None)
    model = qat.prepare(floating, example_inputs=torch.randn(2, 3, 224, 224))
    scales = {p for each in model.modules() if isinstance(each, Quantizer) for p in each.parameters()}
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    buffers = {kind: list(each.buffers()) for kind, each in (("float", floating), ("qat", model))}
    return {
        "model": name,
        "float_bytes": sum(p.nbytes for p in floating.parameters()),
        "bytes": sum(p.nbytes for p in model.parameters()),
        "scale_tensors": len(scales),
        "scale_bytes": sum(p.nbytes for p in scales),
        "float_buckets": buckets_of(p.nbytes for p in reversed(list(floating.parameters()))),
        "buckets": buckets_of(p.nbytes for p in reversed(list(model.parameters()))),
        "buffers": {kind: [len(each), sum(b.nbytes for b in each)] for kind, each in buffers.items()},
        "norms": len(norms),
        # Forward: mean, 1 / std and count are gathered; backward: two sums of each channel are reduced.
        "norm_bytes": sum(4 * (2 * each.num_features + 1) + 4 * 2 * each.num_features for each in norms),
    }


def gradients_table() -> str:
    """What DDP sends in a step."""
    kept = json.loads(OUT.read_text())
    lines = [
        "| model | gradients of float | more with scales | buckets, float and qat | a GPU sends, 8 / 64 | 8 by NVLink |"
        " 64 by network | of it after the backward | buffers, float and qat |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in kept["rows"]:
        total, last = row["bytes"], row["buckets"][-1]
        more = f"{row['scale_bytes'] / 1e3:.0f} kB in {row['scale_tensors']} ({total / row['float_bytes'] - 1:.2%})"
        sent = " / ".join(f"{ring_bytes(total, ranks) / 1e6:.0f}" for ranks in (8, 64))
        near, far = (f"{1e3 * ring_bytes(total, n) / speed:.2f} ms" for n, speed in ((8, NVLINK), (64, NETWORK)))
        rest = f"{1e3 * ring_bytes(last, 64) / NETWORK:.2f} ms ({last / total:.0%})"
        buffers = " and ".join(f"{size / 1e3:.0f} kB in {count}" for count, size in row["buffers"].values())
        counts = f"{len(row['float_buckets'])} and {len(row['buckets'])}"
        cells = [row["model"], f"{row['float_bytes'] / 1e6:.1f} MB", more, counts, f"{sent} MB", near, far, rest]
        lines.append(f"| {' | '.join([*cells, buffers])} |")
    return "\n".join([*lines, "", f"Counted with {conditions_of(kept)}; {kept['date']}."]) + "\n"


def norms_table() -> str:
    """What SyncBatchNorm exchanges in a step."""
    lines = ["| model | BatchNorms | collectives | a GPU gives | 8 GPUs | 64 GPUs |", "|---|---:|---:|---:|---:|---:|"]
    for row in json.loads(OUT.read_text())["rows"]:
        waits = [f"{1e3 * row['norms'] * (latency(1, n) + latency(2, n)):.1f} ms" for n in (8, 64)]
        count, given = row["norms"], f"{row['norm_bytes'] / 1e3:.0f} kB"
        lines.append(f"| {row['model']} | {count} | {2 * count} | {given} | {' | '.join(waits)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(json.dumps({**facts_of_run(), "rows": [counted(name) for name in MODELS]}, indent=1) + "\n")
