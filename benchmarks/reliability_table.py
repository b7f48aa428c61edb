"""docs/reliability.md's tables: what random programs and wrong edits of the code have found."""

import json

from benchmarks.kept import RESULTS, table

VERDICTS = {
    "agrees": "all ways give the same values and gradients",
    "fails": "two ways differ",
    "refused": "the toolkit refuses the model in one sentence, or torch cannot train the plain graph",
    "unclear": "differences that rounding noise explains for every input",
}
"""Keys of fuzz.json's counts, and what they mean."""


def fuzz_table() -> str:
    """How many random programs had which verdict."""
    kept = json.loads((RESULTS / "fuzz.json").read_text())
    counts = kept["counts"]
    rows = [(verdict, f"{counts[verdict]:,}", meaning) for verdict, meaning in VERDICTS.items()]
    about = (
        f"{kept['cases']:,} programs, of which {counts['exported']:,} were also exported,"
        f" {counts.get('litert', 0):,} of them ran in LiteRT too, and {counts['compiled']:,} were compiled;"
        f" {kept['processor']}, torch {kept['torch']}, {kept.get('commit', '')}."
    )
    return f"{about}\n\n{table(('verdict', 'programs', 'meaning'), rows)}"


def mutation_table() -> str:
    """How many wrong edits the tests of each room find."""
    rooms = json.loads((RESULTS / "mutation.json").read_text())["rooms"]
    rows = [(f"`{room}`", str(kept["mutations"]), str(kept["found"])) for room, kept in rooms.items()]
    return table(("room", "wrong edits", "found"), rows, 1)
