"""Arguments that several verbs share."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from qat.training.errors import UserError


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, and who builds its float model if that is the user's own."""
    parser.add_argument(
        "run_path", metavar="RUN", help="a run folder of train.py, or a model.onnx where that is enough"
    )
    parser.add_argument(
        "--model", metavar="PACKAGE.MODULE:CALLABLE", help="builds the float model, for runs of a model of your own"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Changes of the run's config, such as where its data lie now."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="changes of the run's config: data.root=..."
    )


def several(known: Sequence[str]) -> Callable[[str], list[str]]:
    """For `type=`: one name or several with commas, each of the known ones."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return read


def count(text: str) -> int:
    """For `type=`: a whole number above 0."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def counts(text: str) -> list[int]:
    """For `type=`: whole numbers above 0, with commas."""
    return list(dict.fromkeys(count(number) for number in text.split(",")))


def check_folder_of(option: str, path: Path) -> None:
    """Refuse a file to write whose folder is missing, before any work."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option}: '{path}': there is no folder '{path.parent}' to write to; create it first")
