"""The kept rows of the speed benchmark as tables for docs/speed.md, and as README's sentence."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.kept import RESULTS, kept, table
from benchmarks.speed_cases import TITLES
from benchmarks.speed_rows import Row, comparison, conditions_of

CPU = RESULTS / "speed.jsonl"
NOTHING = "Not measured yet.\n"
PEERS = ("ao_fx", "pt2e", "brevitas")


def speed_table(case: str, results: Path = CPU) -> str:
    """A line a comparison: the base, then every variant's ratio to it; below, what is missing and where it was run."""
    rows = rows_of(case, results)
    if not rows:
        return NOTHING
    variants = [name for name in TITLES if name != "float" and any(row["variant"] == name for row in rows)]
    lines = []
    for key in dict.fromkeys(map(comparison, rows)):
        own = {row["variant"]: row for row in rows if comparison(row) == key}
        cells = [_ratio(own[name]) if name in own else "" for name in variants]
        lines.append([subject_of(own["float"]), _base(own["float"]), *cells])
    reasons = dict.fromkeys(f"- {TITLES[row['variant']]} {row['missing']}" for row in rows if "missing" in row)
    notes = [*reasons, *([""] if reasons else ()), "\n\n".join(conditions(rows))]
    return "\n".join([table(["", TITLES["float"], *(TITLES[name] for name in variants)], lines), *notes]) + "\n"


def conditions(rows: list[Row]) -> list[str]:
    """On what, with what and when rows were measured."""
    dates: dict[str, set[str]] = {}
    for row in rows:
        dates.setdefault(conditions_of(row), set()).add(row["date"])
    return [f"{name}; {', '.join(sorted(days))}." for name, days in dates.items()]


def in_short(results: Path = CPU) -> str:
    """README's sentence: the ratios of this project and of its peers, over the models that both trained."""
    rows = [row for row in rows_of("step", results) if "missing" not in row]
    peers = [row for row in rows if row["variant"] in PEERS]
    if not peers:
        return NOTHING
    shared = set(map(comparison, peers))
    own = [row for row in rows if row["variant"] == "qat" and comparison(row) in shared]
    *names, last = (TITLES[name] for name in PEERS if any(row["variant"] == name for row in peers))
    batches = " and ".join(map(str, sorted({row["batch"] for row in own})))
    single = [row for row in rows if row["variant"] == "qat" and row["batch"] == 1]
    costs = f"A step with a single image takes {_span(single)}. " if single else ""
    return (
        f"A training step takes **{_span(own)} of the time of a float step**; {', '.join(names)} and {last} take\n"
        f"{_span(peers)} in the same run ({', '.join(dict.fromkeys(row['subject'] for row in own))},"
        f" {batches} images a step, on a CPU).\n{costs}All of it: [docs/speed.md](docs/speed.md).\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "speed_in_short": in_short,
    "speed_step": lambda: speed_table("step"),
    "speed_evaluation": lambda: speed_table("evaluation"),
    "speed_memory": lambda: speed_table("memory"),
}
"""What the documents mark."""


def rows_of(case: str, results: Path) -> list[Row]:
    """The kept rows of a case, model by model."""
    rows = (row for row in kept(results) if row["case"] == case)
    return sorted(rows, key=lambda row: (row["subject"], row["batch"]))


def subject_of(row: Row) -> str:
    """The first column."""
    exact = "" if any("vnni" in flag for flag in row["machine"]["flags"]) else ", without VNNI"
    return f"{row['subject']}, batch {row['batch']}, {row['size']} px{exact}"


def _span(rows: list[Row]) -> str:
    ratios = [row["ratio"] for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _base(row: Row) -> str:
    if "saved_bytes" in row:
        return f"{row['saved_bytes'] / 1e6:.0f} MB"
    return f"{1000 * row['seconds']:.3g} ms" if row["seconds"] < 1 else f"{row['seconds']:.2f} s"


def _ratio(row: Row) -> str:
    if "missing" in row:
        return "-"
    return f"{row['ratio']:.2f}" + (f" ({row['low']:.2f} to {row['high']:.2f})" if "low" in row else "")
