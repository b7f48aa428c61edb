"""The zoo's results as tables for docs/zoo.md: a line a family, a line a model, and what makes a model green."""

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.kept import RESULTS, kept, table
from benchmarks.zoo_models import FAMILIES

STEPS = ("build", "prepare", "work", "calibrate", "train", "evaluate", "copy", "export", "runtime")
ENOUGH = 0.99
"""The share of integer work that the families' table asks for."""

Row = dict[str, Any]


def results_of(library: str) -> Path:
    """Where the rows of a library's models are kept."""
    return RESULTS / ("zoo.jsonl" if library == "torchvision" else f"zoo_{library}.jsonl")


def verdict(row: Row) -> str:
    """ "green", or the first thing that is not as it should be: the step, and its reason."""
    for name in STEPS:
        step = row["steps"].get(name)
        if step is None:
            return f"{name}: not reached"
        if not step["ok"]:
            return f"{name}: {step['reason']}"
        if step.get("unexplained"):
            place, kind = next((place, kind) for place, kind, _, why in step["in_float"] if why is None)
            where = f"{place} ({kind})" if place else kind
            return f"{name}: {step['unexplained']} places compute in float without a reason, such as {where}"
    return "green"


def families_table() -> str:
    """One line a family: how many are measured, green, and do nearly all of their work on integers."""
    rows = kept(results_of("torchvision"))
    lines = []
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family]
        green = sum(verdict(row) == "green" for row in own)
        enough = sum(row["steps"].get("work", {}).get("share", 0.0) >= ENOUGH for row in own)
        if own:
            lines.append([family, *map(str, (own[0]["family_size"], len(own), green, enough))])
    titles = ("family", "models", "measured", "green", f"at least {ENOUGH:.0%} integer work")
    return table(titles, lines) + _conditions(rows)


def models_table(library: str = "torchvision") -> str:
    """One line a model, and how many of another library are one graph, in parts, and refused."""
    rows = kept(results_of(library))
    titles = (
        "model", "as", "parameters", "input", "quantized layers", "integer work", "steps", "evaluation", "export",
        "ONNX Runtime", "verdict",
    )  # fmt: skip
    families = FAMILIES if library == "torchvision" else (library,)
    models = table(titles, [_cells(row) for family in families for row in rows if row["family"] == family])
    if library == "torchvision":
        return models  # the families' table says the rest
    counts = Counter(map(_way, rows))
    said = ", ".join(f"{counts[way]} {way}" for way in ("whole", "in parts", "refused"))
    return f"{models}\n{said}.\n{_conditions(rows)}"


def _way(row: Row) -> str:
    """How `prepare` took it: as one graph, in parts, or not at all."""
    prepared = row["steps"].get("prepare", {})
    if not prepared.get("ok"):
        return "refused"
    return {True: "whole", False: "in parts"}.get(prepared.get("whole"), "")


def _cells(row: Row) -> list[str]:
    steps = row["steps"]
    shapes = [" x ".join(map(str, shape)) for shape in row.get("inputs", [])]
    given, returned = (steps.get(step, {}).get("result") for step in ("build", "evaluate"))
    return [
        row["name"].rpartition("/")[2],
        _way(row) + (f", returns {returned} for {given}" if returned and returned != given else ""),
        f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "",
        f"{len(shapes)} of {shapes[0]}" if len(shapes) > 1 else "".join(shapes),
        str(steps.get("prepare", {}).get("quantized_layers", "")),
        f"{100 * steps['work']['share']:.2f} %" if "share" in steps.get("work", {}) else "",
        _passed(steps.get("train")),
        _evaluated(steps.get("evaluate")),
        f"{steps['export']['seconds']:.0f} s" if steps.get("export", {}).get("ok") else _passed(steps.get("export")),
        _runtime(steps.get("runtime", {})),
        verdict(row).replace("|", "\\|").replace("<", "&lt;"),
    ]


def _passed(step: Row | None) -> str:
    return "" if step is None else "ok" if step["ok"] else "fails"


def _evaluated(step: Row | None) -> str:
    """How near answers without gradients are to those with them, and which batches the model refuses either way."""
    if step is None or "gaps" not in step:
        return _passed(step)
    gap, refused = max(step["gaps"].values(), default=0.0), "; ".join(f"{name} refused" for name in step["refused"])
    return f"{f'off by {gap:.0e}' if gap else 'equal'}{f' ({refused})' if refused else ''}"


def _runtime(step: Row) -> str:
    if "integers" not in step:
        return _passed(step or None)
    differing = f"{step['differing']:,} of {step['integers']:,} integers differ"
    by = f", by up to {step['largest']}" if step["differing"] else ""
    return f"{differing}{by}; arg max {step['arg_max_equal']:,} of {step['arg_max_compared']:,}"


def _conditions(rows: list[Row]) -> str:
    """On what it was measured, in a line."""
    known = [row for row in rows if "versions" in row]
    if not known:
        return ""
    versions = sorted({", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in known})
    threads = sorted({row["machine"]["threads"] for row in known})
    older = sum("files_of" in row for row in rows)
    dates, commits = ([*dict.fromkeys(row[key] for row in known if key in row)] for key in ("date", "commit"))
    return (
        f"\n{'; '.join(versions)}; {' or '.join(map(str, threads))} thread{'s' * (threads != [1])} a model,"
        f" {sum(row['seconds'] for row in rows) / 60:.0f} minutes in all,"
        f" at most {max(row.get('peak_gib', 0.0) for row in known):.1f} GiB;"
        f" {', '.join(dates)} at {', '.join(commits)}; the files of {older} as at an earlier commit.\n"
    )
