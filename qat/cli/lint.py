"""List what a runtime would refuse in a quantized ONNX file, or compute in float.

The file may be of any tool. Nothing is run: the rules come from the runtime's documents and sources. The status is 1
if there is an error (not loaded, not run, other answers) or a warning (slower than it could be), and 0 if there are
only notes.
"""

import argparse
from itertools import groupby
from pathlib import Path

from qat.export import lint_onnx
from qat.export.lint.rules import PROFILES
from qat.training.errors import UserError, value_errors_reported

EXAMPLE = "python -m qat lint runs/resnet_int8/model.onnx --for tensorrt"
SEVERITIES = ("error", "warning", "note")
SHOWN = 3  # operators of a rule that are named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL.onnx", help="an ONNX file, or a run folder of train.py")
    parser.add_argument("--for", required=True, dest="runtime", choices=PROFILES, help="the runtime that is to run it")
    parser.add_argument("--all", action="store_true", help=f"name all operators of a rule, not the first {SHOWN}")


def run(given: argparse.Namespace) -> int:
    path = Path(given.file).expanduser()
    path = path / "model.onnx" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"MODEL.onnx: there is no file '{path}'")
    with value_errors_reported():
        findings = lint_onnx(path, given.runtime)
    findings.sort(key=lambda each: (SEVERITIES.index(each.severity), each.rule.name))
    for rule, group in groupby(findings, key=lambda each: each.rule):
        same = list(group)
        named = [each.operator + f" ({each.detail})" * bool(each.detail) for each in same]
        more = len(named) - SHOWN if not given.all else 0
        print(f"{same[0].severity}: {rule.says} [{rule.name}]")
        print(f"  at {', '.join(named[:-more] if more > 0 else named)}{f', and {more} more' * (more > 0)}")
        print(*[f"  remedy: {rule.remedy}\n"] * bool(rule.remedy), f"  source: {rule.source}", sep="")
    counts = [sum(each.severity == severity for each in findings) for severity in SEVERITIES]
    print(f"{path.name} for {given.runtime}: {counts[0]} errors, {counts[1]} warnings, {counts[2]} notes")
    return int(any(counts[:2]))
