"""Write what was measured into documents and configs: it comes from kept results and from the code, it is not typed.

python train.py --config resnet_int8.yaml run_dir=runs/measured
python -m benchmarks.document runs/measured/summary.json      # keeps the summary under benchmarks/results too
python -m benchmarks.document                                 # from what is kept
"""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from benchmarks.accuracy_table import accuracy_in_short, accuracy_table, model_table, with_result
from benchmarks.config_table import config_table, configs_table
from benchmarks.gpu_count import count_table
from benchmarks.gpu_steps import gpu_table
from benchmarks.kept import RESULTS
from benchmarks.reference_table import reference_table
from benchmarks.reliability_table import fuzz_table, mutation_table
from benchmarks.rules_table import calibrated_table, rules_table
from benchmarks.speed_table import TABLES as SPEED_TABLES
from benchmarks.targets_table import limits_table, reasons_table, targets_table
from benchmarks.tasks import tasks_table
from benchmarks.worth_table import post_training_table, worth_table
from benchmarks.zoo_libraries import NAMES
from benchmarks.zoo_table import families_table, models_table
from qat.training.run.report import report_lines

ROOT = Path(__file__).resolve().parents[1]
FROM_CODE = {
    "accuracy": accuracy_table,
    "accuracy_in_short": accuracy_in_short,
    "accuracy_own_float": partial(accuracy_table, own_float=True),
    "config": config_table,
    "configs": configs_table,
    "fuzz": fuzz_table,
    "mutation": mutation_table,
    "speed_gpu": gpu_table,
    "gpu_count": count_table,
    "models": model_table,
    "post_training": post_training_table,
    "worth": worth_table,
    "reference": reference_table,
    "rules": rules_table,
    "calibrated_rules": calibrated_table,
    "targets": targets_table,
    "tasks": tasks_table,
    "target_limits": limits_table,
    "target_reasons": reasons_table,
    "zoo_families": families_table,
    "zoo_models": models_table,
    **{f"zoo_{library}": partial(models_table, library) for library in NAMES},
    **SPEED_TABLES,
}
MARKED = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?<!-- end -->", re.DOTALL)
DOCUMENTS = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if MARKED.search(path.read_text())
)


def with_tables(document: str) -> str:
    """The document with every marked table made anew."""
    return MARKED.sub(lambda match: f"{match[1]}{table_of(match['name'])}<!-- end -->", document)


def table_of(name: str) -> str:
    """The Markdown between the marks: a table from the code or from measurements, or a run's summary as text."""
    if name in FROM_CODE:
        return FROM_CODE[name]()
    lines = report_lines(json.loads((RESULTS / f"{name}.json").read_text()))
    return "\n".join(["```", *lines, "```", ""])


def main() -> None:
    for given in sys.argv[1:]:
        summary = Path(given)
        shutil.copyfile(summary, RESULTS / f"{json.loads(summary.read_text())['name']}.json")
    for name in DOCUMENTS:
        document = ROOT / name
        document.write_text(with_tables(document.read_text()))
    for config in (ROOT / "configs").glob("*.yaml"):
        config.write_text(with_result(config.read_text(), config.stem))


if __name__ == "__main__":
    main()
