"""Run every check on every estimator and write the results to docs/estimators_matrix.md.

python tests/estimator_matrix.py            # writes the table
python tests/estimator_matrix.py --check    # writes nothing; fails if a cell is red or the table is out of date
"""

import argparse
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from qat.testing import CHECKS  # noqa: E402
from tests.references import estimator_proof as proof  # noqa: E402
from tests.references.estimator_case import PROPERTIES, Case  # noqa: E402

TABLE = ROOT / "docs" / "estimators_matrix.md"
COMMAND = "python tests/estimator_matrix.py"
REFERENCES: dict[str, Callable[[Case], None]] = {
    "reference": proof.reference,
    "reference gradient": proof.reference_gradient,
}
COLUMNS = (*REFERENCES, *CHECKS, *PROPERTIES)
GREEN, RED, NOTHING = "✓", "✗", "·"
INTRODUCTION = f"""# What is proven of every estimator

Written by `{COMMAND}`; do not edit. With `--check` the command fails if a cell is red or if
this table is out of date.

In a cell: {GREEN} it holds. A number: it cannot hold, for the reason below the table, and it is checked that it does
not. {NOTHING} there is nothing to look at (no parameter that broadcasts). {RED} it fails.

- *reference*, *reference gradient*: forward and every gradient equal a NumPy float64 reference, written from the
  published formula and not from the code, for parameters of the tensor and of each channel.
- *gradient* to *nan_inf*: the checks of `qat.testing.ste_gradcheck`.
- *idempotent*: f(f(x)) = f(x). *monotone*: never falls as x rises. *levels*: at most the rule's number of distinct
  values. *zero*: 0 stays exactly 0. *outside*: where x is out of range its gradient is exactly 0.
"""


def cell(case: Case, column: str) -> str:
    """Empty if the check holds; else its excuse, NOTHING if it does not apply, or RED and the error."""
    excuse = proof.excuses(case).get(column)
    try:
        if column in PROPERTIES:
            (proof.not_to_be_had if excuse else proof.holds)(case, column)
            return excuse or ""
        try:
            if column in REFERENCES:
                REFERENCES[column](case)
            elif proof.gradcheck(case, column).skipped:
                return NOTHING
        except AssertionError:
            if excuse:
                return excuse
            raise
        return f"{RED} is excused, but holds" if excuse else ""
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{RED} {type(error).__name__}: {text[:300]}"


def run(cases: list[Case]) -> list[list[str]]:
    rows = []
    for number, case in enumerate(cases, start=1):
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)} {case.name:<70.70}", end="", file=sys.stderr, flush=True)
        rows.append([cell(case, column) for column in COLUMNS])
    return rows


def versions() -> str:
    release = re.match(r"[\d.]+", torch.__version__)
    return f"Run with torch {release[0] if release else torch.__version__}, Python {platform.python_version()}."


def table(cases: list[Case], rows: list[list[str]]) -> str:
    """The document; reasons are numbered in order of appearance."""
    reasons = {text: 0 for row in rows for text in row if text and text != NOTHING and not text.startswith(RED)}
    reasons = {text: number for number, text in enumerate(reasons, start=1)}
    lines = [INTRODUCTION, versions(), "", f"| estimator | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for case, row in zip(cases, rows, strict=True):
        cells = [GREEN if not text else RED if text.startswith(RED) else f"{reasons.get(text, text)}" for text in row]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in reasons.items()), ""])


def red(cases: list[Case], rows: list[list[str]]) -> list[str]:
    return [
        f"{case.name}, {column}: {text}"
        for case, row in zip(cases, rows, strict=True)
        for column, text in zip(COLUMNS, row, strict=True)
        if text.startswith(RED)
    ]


def without_versions(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("Run with torch ")]


def all_cases() -> list[Case]:
    from tests.references import cases_codebooks, cases_uniform

    return [*cases_uniform.CASES, *cases_codebooks.CASES]


def main(arguments: list[str] | None = None, cases: list[Case] | None = None, path: Path = TABLE) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a cell is red or the table is out of date")
    check = parser.parse_args(arguments).check
    cases = all_cases() if cases is None else cases
    rows = run(cases)
    document, failures = table(cases, rows), red(cases, rows)
    print("\n".join([*failures, f"{len(cases)} estimators, {len(COLUMNS)} checks, {len(failures)} red"]))
    if not check:
        path.parent.mkdir(exist_ok=True)
        path.write_text(document, encoding="utf-8")
        return 1 if failures else 0
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    if without_versions(committed) != without_versions(document):
        print(f"{path.name} is out of date; run: {COMMAND}")
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
