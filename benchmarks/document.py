"""Write the measured tables into the documents: README.md's table comes from a run's summary.json, it is not typed.

python train.py --config resnet_int8.yaml run_dir=runs/measured
python -m benchmarks.document runs/measured/summary.json      # keeps the summary under benchmarks/results too
python -m benchmarks.document                                 # from what is kept
"""

import json
import re
import shutil
import sys
from pathlib import Path

from qat.training.logging import format_table
from qat.training.report import table_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (?P<name>\w+) -->\n```\n)(?P<body>.*?)(```)", re.DOTALL)


def table_of(name: str) -> str:
    """The table of one kept summary, with the machine and the versions that it was measured on."""
    summary = json.loads((RESULTS / f"{name}.json").read_text())
    versions = ", ".join(f"{package} {number}" for package, number in summary["versions"].items())
    layers = summary["onnx"]["layers"]
    return (
        f"{format_table(table_rows(summary))}\n\n"
        f"{layers['differing']} of {layers['elements']:,} integers differ over {layers['compared']} layers;"
        f" {summary['seconds']:.0f} s on {summary['machine']['threads']} threads\n{versions}\n"
    )


def with_tables(document: str) -> str:
    """The document with every marked table made anew."""
    return MARKED.sub(lambda match: f"{match[1]}{table_of(match['name'])}{match[4]}", document)


def main() -> None:
    for given in sys.argv[1:]:
        summary = Path(given)
        shutil.copyfile(summary, RESULTS / f"{json.loads(summary.read_text())['name']}.json")
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))


if __name__ == "__main__":
    main()
