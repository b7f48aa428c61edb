"""Draw the report of a run anew, or one page of several runs side by side.

A run writes report.html at its end. What the verb sensitivity has measured since then is drawn too.
"""

import argparse
from pathlib import Path

from qat.cli.runs import check_folder_of, open_run
from qat.training.errors import UserError
from qat.training.report.findings import ReportedRun
from qat.training.report.page import write_report
from qat.training.run.folder import REPORT

EXAMPLE = "python -m qat report runs/resnet_int8 runs/resnet_int8-2 --to both.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py, finished or not")
    parser.add_argument("--to", metavar="FILE", help="the page to write; default: report.html in the run's folder")


def run(given: argparse.Namespace) -> int:
    folders = [open_run(path).folder for path in given.runs]
    if given.to is None and len(folders) > 1:
        raise UserError("--to: missing; name the page of several runs, such as --to both.html")
    path = folders[0] / REPORT if given.to is None else Path(given.to).expanduser()
    check_folder_of("--to", path)
    for sentence in write_report(path, [ReportedRun(folder) for folder in folders], pictures=given.to is None):
        print(sentence)
    print(path)
    return 0
