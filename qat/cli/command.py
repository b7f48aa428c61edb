"""Command-line entry point: builds the parser, and runs a verb."""

import argparse
import logging
from contextlib import nullcontext

import qat
from qat.cli import benchmark, compare, evaluate, export, lint, predict, report, sensitivity, train, verify
from qat.training.config.imports import import_extensions, only_code
from qat.training.run.exit_status import exit_status
from qat.training.script import OVERRIDE

# A verb is a module with `EXAMPLE`, `add_arguments(parser)` and `run(given) -> int`. Its docstring is the help, and its
# `WAY_ON`, if defined, tells a user who interrupted the verb how to continue.
VERBS = {
    each.__name__.rpartition(".")[2]: each
    for each in (train, report, predict, evaluate, verify, sensitivity, compare, benchmark, export, lint)
}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return 1 if a comparison fails, for others see `exit_status`."""
    parser = build_parser()
    given, more = parser.parse_known_args(arguments)
    if more and not (hasattr(given, "overrides") and all(OVERRIDE.match(each) for each in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # argparse takes no further ones after an option
        given.overrides = [*given.overrides, *more]
    logging.basicConfig(format="%(message)s", level=logging.WARNING)

    def run() -> int:
        named = getattr(given, "imports", [])
        with nullcontext() if given.run is train.run else only_code({*named, getattr(given, "model", None) or ""}):
            import_extensions(named, "--import")
            return int(given.run(given))

    return exit_status(run, way_on=given.way_on)


def build_parser() -> argparse.ArgumentParser:
    example = f"example: {train.EXAMPLE}; VERB --help has one for each"
    parser = argparse.ArgumentParser(prog="python -m qat", description="Train, use, check and measure.", epilog=example)
    parser.add_argument("--version", action="version", version=qat.__version__)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, module in VERBS.items():
        text = str(module.__doc__)
        verb = verbs.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
        verb.set_defaults(run=module.run, way_on=getattr(module, "WAY_ON", ""))
    return parser
