"""Speed of training and evaluation: this project, and in training its peers, as ratios to the float model.

    pip install -e ".[bench]"                                     # the peers; those that are missing are named
    python -m benchmarks.speed                                    # everything, on 2 threads: about an hour
    python -m benchmarks.speed --cases step --models resnet18 --rounds 25 --without pt2e
    python -m benchmarks.document                                 # docs/speed.md's tables

Every comparison runs interleaved in one process: a round runs each variant once, and a ratio is one of the same round.
Rows go to a file of JSON lines as soon as a comparison is done; progress goes to stderr.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import RESULTS
from benchmarks.speed_cases import BUILDERS, Setting, TrainingStep, evaluation, makers
from benchmarks.speed_memory import saved_bytes
from benchmarks.speed_rows import Row, facts_of_run, keep
from benchmarks.speed_timing import Limits, contest, reason

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16")
SIZES = {"vit_b_16": 224}
"""Height and width of the images, where it is not 112."""
CASES = ("step", "evaluation", "memory")


def measured(case: str, setting: Setting, variants: Sequence[str], limits: Limits) -> list[Row]:
    """The rows of one comparison, also of variants that did not run; float is its base."""
    if case == "memory":
        facts, missing = memory(setting, variants)
    else:
        known = [name for name in variants if case == "step" or name in ("float", "qat")]
        calls = makers(setting, known, TrainingStep if case == "step" else evaluation)
        found = contest(calls, "float", limits)
        facts, missing = {name: asdict(timing) for name, timing in found.timings.items()}, found.missing
    about = {"case": case, **asdict(setting), "base": "float"}
    rows = [{**about, "variant": name, **own} for name, own in facts.items()]
    return rows + [{**about, "variant": name, "missing": why} for name, why in missing.items()]


def memory(setting: Setting, variants: Sequence[str]) -> tuple[dict[str, Row], dict[str, str]]:
    """The bytes that every variant keeps between forward and backward, and why others did not run."""
    saved: dict[str, int] = {}
    missing: dict[str, str] = {}
    for variant, make in makers(setting, variants, TrainingStep).items():
        try:
            step: Any = make()
            step()
            saved[variant] = saved_bytes(step.loss)
        except Exception as error:
            if variant == "float":
                raise
            missing[variant] = reason(error)
    ratios = {name: {"saved_bytes": number, "ratio": number / saved["float"]} for name, number in saved.items()}
    return ratios, missing


def said(row: Row) -> str:
    """A row in one line, for the terminal."""
    start = f"{row['case']} {row['subject']} batch {row['batch']}: {row['variant']}: "
    if "missing" in row:
        return start + row["missing"]
    saves = f", saves {row['saved_bytes'] / 1e6:.0f} MB" if "saved_bytes" in row else ""
    seconds = f", {1000 * row['seconds']:.2f} ms in {row['rounds']} rounds" if "seconds" in row else ""
    return f"{start}{row['ratio']:.2f}{saves}{seconds}"


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = sorted({*BUILDERS} - {"float"})
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    made.add_argument("--models", nargs="+", default=list(MODELS), help="names in torchvision")
    made.add_argument("--batch", nargs="+", type=int, default=[1, 16], help="images a step")
    made.add_argument("--size", type=int, help="height and width, instead of 112, and 224 for ViT")
    made.add_argument("--rounds", type=int, default=15, help="of every comparison, at most")
    made.add_argument("--seconds", type=float, default=300, help="of a comparison, after which no round starts")
    made.add_argument("--threads", type=int, default=2, help="of torch")
    made.add_argument("--without", nargs="+", default=[], choices=peers, metavar="VARIANT", help=" ".join(peers))
    made.add_argument("--out", type=Path, default=RESULTS / "speed.jsonl", help="JSON lines; same comparisons go")
    given = made.parse_args(arguments)
    warnings.simplefilter("ignore")  # the peers' deprecations
    torch.set_num_threads(given.threads)
    variants = [name for name in BUILDERS if name not in given.without]
    for case in given.cases:
        for model in given.models:
            for batch in given.batch:
                about = facts_of_run()  # before it is measured: the load is that of others
                setting = Setting(model, batch, given.size or SIZES.get(model, 112))
                rows = measured(case, setting, variants, Limits(given.rounds, given.seconds))
                keep([{**row, **about} for row in rows], given.out)
                print(*map(said, rows), sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
