"""The kept rows of the speed benchmark as tables for docs/speed.md."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu_table import gpu_table
from benchmarks.speed_rows import RESULTS, Row, comparison, kept
from benchmarks.speed_variants import TITLES

CPU = RESULTS / "speed.jsonl"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "speed.png"
NOTHING = "Not measured yet.\n"
BUSY = 1.0
"""Load a core from which on a table of single steps says so."""
FEW_STEPS = "These are single steps: what a step costs stands in the first table."
PEERS = ("ao_fx", "pt2e", "brevitas")
"""What README compares with. Brevitas' first steps, which collect statistics, are left out: they are slower still."""

SUBJECTS = {
    "activation": "activations, 8 bits per tensor",
    "weight": "weights, 8 bits per channel",
}


def ratio_table(case: str, results: Path = CPU, device: str = "cpu") -> str:
    """A line a comparison: seconds of the base, then every variant's ratio with its smallest and largest round."""
    rows = rows_of(case, results, device)
    return _table(rows, ["", "{base}"], lambda row: [_milliseconds(row)], _ratio)


def memory_table(results: Path = CPU, device: str = "cpu") -> str:
    """A line a comparison: what float saves, then every variant's ratio of saved bytes and of a step's rise."""
    rows = rows_of("memory", results, device)
    return _table(rows, ["", "{base} saves / rises by"], lambda row: [_megabytes(row)], _memory)


def cold_table(results: Path = CPU) -> str:
    """A line a model and variant: the first two steps of a fresh process; and how busy the machine was."""
    rows = rows_of("cold", results)
    if not rows:
        return NOTHING
    lines = [
        "| | variant | first step | more than float | with preparation, more than float | the second step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [subject_of(row), TITLES[row["variant"]]]
        if "missing" in row:
            cells += [row["missing"], "", "", ""]
        else:
            own = row["variant"] == row["base"]
            differences = ["" if own else f"{row[name]:+.1f} s" for name in ("difference", "difference_prepared")]
            cells += [f"{row['seconds']:.2f} s", *differences, f"{row['later_step']:.2f} s"]
        lines.append(_line(cells))
    load, cores = max((row["machine"]["load"], row["machine"]["cores"]) for row in rows)
    if load > BUSY * cores:
        lines += ["", f"Measured on a busy machine (load {load:.1f} on {cores} cores before it began). {FEW_STEPS}"]
    return "\n".join(lines) + "\n"


def conditions(results: Path = CPU) -> str:
    """On what, with what and when it was measured."""
    rows = kept(results)
    if not rows:
        return NOTHING
    lines = []
    for name in dict.fromkeys(conditions_of(row) for row in rows):
        own = [row for row in rows if conditions_of(row) == name]
        loads = [row["machine"]["load"] for row in own]
        dates = sorted({row["date"] for row in own})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"{name}; {when}, load {min(loads):.1f} to {max(loads):.1f} before each comparison.")
    return "\n\n".join(lines) + "\n"


def picture() -> str:
    """The plot, once it is there."""
    return "![Time of a training step as a ratio to float](speed.png)\n" if PICTURE.exists() else NOTHING


def in_short(results: Path = CPU) -> str:
    """README's sentence: the ratios of this project and of its peers, over the models that both trained."""
    rows = [row for row in rows_of("step", results) if "missing" not in row]
    peers = [row for row in rows if row["variant"] in PEERS]
    if not peers:
        return NOTHING
    shared = {comparison(row) for row in peers}
    own = [row for row in rows if row["variant"] == "qat" and comparison(row) in shared]
    *names, last = (TITLES[name] for name in PEERS if any(row["variant"] == name for row in peers))
    batches = " and ".join(map(str, sorted({row["batch"] for row in own})))
    single = [row for row in rows_of("scaling", results) if row["variant"] == "qat" and row["batch"] == 1]
    costs = f"A step with a single image takes {_span(single)}. " if single else ""
    return (
        f"A training step takes **{_span(own)} of the time of a float step**; {', '.join(names)} and {last} take\n"
        f"{_span(peers)} in the same run ({', '.join(dict.fromkeys(row['subject'] for row in own))},"
        f" {batches} images a step, on a CPU).\n{costs}All of it: [docs/speed.md](docs/speed.md).\n"
    )


def _span(rows: list[Row]) -> str:
    ratios = [row["ratio"] for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "speed_in_short": in_short,
    "speed_conditions": conditions,
    "speed_picture": picture,
    "speed_step": lambda: ratio_table("step"),
    "speed_op": lambda: ratio_table("op"),
    "speed_compiled": lambda: ratio_table("compiled"),
    "speed_memory": memory_table,
    "speed_cold": cold_table,
    "speed_scaling": lambda: ratio_table("scaling"),
    "speed_gpu": gpu_table,
}
"""What docs/speed.md marks."""


def rows_of(case: str, results: Path, device: str = "cpu") -> list[Row]:
    """The kept rows of a case on a device."""
    return [row for row in kept(results) if row["case"] == case and row.get("device") == device]


def subject_of(row: Row) -> str:
    """The first column."""
    if "batch" in row:
        return f"{row['subject']}, batch {row['batch']}, {row['size']} px"
    shape = " x ".join(map(str, row["size"]))
    return f"{SUBJECTS.get(row['subject'], row['subject'])}, {shape}"


def _table(
    rows: list[Row], heads: Sequence[str], base_cells: Callable[[Row], list[str]], cell: Callable[[Row], str]
) -> str:
    if not rows:
        return NOTHING
    base = rows[0]["base"]
    variants = [name for name in TITLES if name != base and any(row["variant"] == name for row in rows)]
    titles = [head.format(base=TITLES[base]) for head in heads] + [TITLES[name] for name in variants]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    notes: dict[str, list[str]] = {}
    for key in dict.fromkeys(comparison(row) for row in rows):
        own = {row["variant"]: row for row in rows if comparison(row) == key}
        cells = [subject_of(own[base]), *base_cells(own[base])]
        for name in variants:
            row = own.get(name)
            if row is not None and "missing" in row:
                notes.setdefault(f"{TITLES[name]} {row['missing']}", []).append(subject_of(own[base]))
            cells.append("" if row is None else "-" if "missing" in row else cell(row))
        lines.append(_line(cells))
    text = "\n".join(lines) + "\n"
    if notes:
        text += "\n" + "\n".join(f"- {_plain(why)} ({'; '.join(where)})" for why, where in notes.items()) + "\n"
    return text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _milliseconds(row: Row) -> str:
    return f"{1000 * row['seconds']:.3g} ms" if row["seconds"] < 1 else f"{row['seconds']:.2f} s"


def _megabytes(row: Row) -> str:
    rise = "" if row["peak_bytes"] is None else f" / {row['peak_bytes'] / 1e6:.0f} MB"
    return f"{row['saved_bytes'] / 1e6:.0f} MB{rise}"


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _memory(row: Row) -> str:
    return f"{row['ratio']:.2f}" + ("" if row["peak_ratio"] is None else f" / {row['peak_ratio']:.2f}")


def conditions_of(row: Row) -> str:
    """The machine and the versions of a row, in words."""
    machine = row["machine"]
    flags = f" with {', '.join(machine['flags'])}" if machine["flags"] else ""
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{gpu}{machine['processor']}{flags}, {machine['threads']} of {machine['cores']} threads; {versions}"
