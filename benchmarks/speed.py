"""Speed and memory of quantization-aware training: this project and its peers, as ratios to float training.

    pip install -e ".[bench]"                                       # the peers; those that are missing are named
    python -m benchmarks.speed                                      # everything, on 2 threads; one to two hours
    python -m benchmarks.speed --cases step --models resnet18 --rounds 25 --without brevitas_collecting
    python -m benchmarks.speed_plot && python -m benchmarks.document   # docs/speed.png and docs/speed.md's tables

Every comparison runs interleaved in one process: a round runs each variant once, and a ratio is one of the same round.
Rows go to a file of JSON lines as soon as a comparison is done; progress goes to stderr.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_cases import CASES, MODELS, Plan
from benchmarks.speed_operators import OPERATORS
from benchmarks.speed_rows import RESULTS, Row, facts_of_run, keep
from benchmarks.speed_timing import Limits
from benchmarks.speed_variants import BUILDERS

BASES = ("float", "relu")
"""Variants that everything is compared with."""


def said(row: Row) -> str:
    """A row in one line, for the terminal."""
    subject = f" {row['subject']}" if "subject" in row else ""
    batch = f" batch {row['batch']}" if "batch" in row else ""
    start = f"{row['case']}{subject}{batch} on {row['device']}: {row['variant']}"
    if "missing" in row:
        return f"{start}: {row['missing']}"
    if "saved_bytes" in row:
        peak = "" if row["peak_bytes"] is None else f", a step rises by {row['peak_bytes'] / 1e6:.0f} MB"
        return f"{start}: {row['ratio']:.2f}, saves {row['saved_bytes'] / 1e6:.0f} MB{peak}"
    end = f", {row['share']:.0%} of a copy's bandwidth" if "share" in row else ""
    end += (
        f", {row['difference']:+.1f} s ({row['difference_prepared']:+.1f} s with preparation)"
        if "difference" in row
        else ""
    )
    spread = f"{row['low']:.2f} to {row['high']:.2f} in {row['rounds']} rounds"
    return f"{start}: {row['ratio']:.2f} ({spread}), {1000 * row['seconds']:.2f} ms{end}"


def run(cases: list[str], plan: Plan, out: Path) -> list[Row]:
    """Measure the cases one after the other; returns their rows."""
    torch.set_num_threads(plan.threads)
    every: list[Row] = []
    for case in cases:
        measured = CASES[case](plan)
        while True:
            about = facts_of_run()
            rows: list[Row] | None = next(measured, None)
            if rows is None:
                break
            full = [{**row, **about} for row in rows]
            keep(full, out)
            every += full
            for row in full:
                print(said(row), file=sys.stderr, flush=True)
    return every


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    left_out = sorted({*BUILDERS, *OPERATORS} - set(BASES))
    made.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE", help=" ".join(CASES)
    )
    made.add_argument("--models", nargs="+", default=list(MODELS), help="names in torchvision")
    made.add_argument("--batch", nargs="+", type=int, help="instead of 16, and 32 for resnet18; 128 on a GPU")
    made.add_argument("--size", type=int, help="height and width, instead of 112, and 224 for ViT and on a GPU")
    made.add_argument("--layout", default="channels_last", choices=("channels_last", "contiguous"))
    made.add_argument("--rounds", type=int, default=15, help="of every comparison, at most")
    made.add_argument("--seconds", type=float, default=300, help="of a comparison, after which no round starts")
    made.add_argument("--threads", type=int, default=2, help="of torch")
    made.add_argument("--without", nargs="+", default=[], choices=left_out, metavar="VARIANT", help=" ".join(left_out))
    made.add_argument("--out", type=Path, default=RESULTS / "speed.jsonl", help="JSON lines; same comparisons go")
    return made


def main(arguments: list[str] | None = None) -> None:
    given: Any = parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # the peers' deprecations
    plan = Plan(
        given.models,
        given.batch,
        given.size,
        given.layout,
        given.threads,
        Limits(given.rounds, given.seconds),
        given.without,
    )
    run(given.cases, plan, given.out)


if __name__ == "__main__":
    main()
