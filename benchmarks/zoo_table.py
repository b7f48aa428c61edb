"""The zoo's results as tables for docs/zoo.md: a line a family, a line a model, and what makes a model green."""

import json
from pathlib import Path
from typing import Any

from benchmarks.zoo_models import FAMILIES

RESULTS = Path(__file__).resolve().parent / "results" / "zoo.jsonl"
BEFORE: dict[str, tuple[str, dict[str, int]]] = {
    "timm": ("96122f6", {"whole": 8, "in parts": 16}),
    "transformers": ("e16e785", {"whole": 3, "in parts": 11, "refused": 2}),
    "ultralytics": ("e16e785", {"in parts": 3}),
}
"""How `prepare` took these models at an earlier commit; those in parts are refused by `export_onnx` as one file."""

STEPS = ("build", "prepare", "work", "calibrate", "train", "evaluate", "copy", "export", "runtime")
ENOUGH = 0.99
"""The share of integer work that the families' table asks for."""


def results_of(library: str) -> Path:
    """Where the rows of a library's models are kept."""
    return RESULTS if library == "torchvision" else RESULTS.with_name(f"zoo_{library}.jsonl")


def kept(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows so far, in alphabetical order."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def verdict(row: dict[str, Any]) -> str:
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


def families_table(results: Path = RESULTS) -> str:
    """One line a family: how many are measured, green, and do nearly all of their work on integers."""
    lines = [
        f"| family | models | measured | green | at least {ENOUGH:.0%} integer work |",
        "|---|---|---|---|---|",
    ]
    rows = kept(results)
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family]
        if own:
            green = sum(verdict(row) == "green" for row in own)
            lines.append(f"| {family} | {own[0]['family_size']} | {len(own)} | {green} | {sum(map(_enough, own))} |")
    return "\n".join(lines) + "\n" + _conditions(rows)


def library_table(library: str, results: Path | None = None) -> str:
    """One line a model of another library, and how many are one graph, in parts, and refused."""
    rows = kept(results or results_of(library))
    counts = {"whole": 0, "in parts": 0, "refused": 0}
    lines = [
        f"| model of {library} | as | prepare | parameters | quantized layers | integer work | steps | evaluation"
        " | ONNX Runtime | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        prepared = row["steps"].get("prepare", {})
        kind = "refused" if not prepared.get("ok") else "whole" if prepared["whole"] else "in parts"
        counts[kind] += 1
        given, returned = (row["steps"].get(step, {}).get("result") for step in ("build", "evaluate"))
        kind += f", returns {returned} for {given}" if returned != given and returned else ""
        took = f"{prepared['seconds']:.1f} s" if "seconds" in prepared else ""
        name, size, _, layers, work, train, evaluated, _, runtime, said = _cells(row)
        cells = (name.rpartition("/")[2], kind, took, size, layers, work, train, evaluated, runtime, said)
        lines.append(f"| {' | '.join(cells)} |")
    now = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    commit, earlier = BEFORE[library]
    before = ", ".join(f"{count} {kind}" for kind, count in earlier.items())
    return (
        "\n".join(lines)
        + f"\n\nNow: {now}. Before ({commit}, {sum(earlier.values())} models): {before}.\n"
        + _conditions(rows)
    )


def models_table(results: Path = RESULTS) -> str:
    """One line a model."""
    lines = [
        "| model | parameters | input | quantized layers | integer work | steps | evaluation | export | ONNX Runtime"
        " | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = kept(results)
    for family in FAMILIES:
        lines += [_line(row) for row in rows if row["family"] == family]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    return "| " + " | ".join(_cells(row)) + " |"


def _cells(row: dict[str, Any]) -> list[str]:
    steps = row["steps"]
    return [
        row["name"],
        f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "",
        _inputs(row.get("inputs", [])),
        str(steps.get("prepare", {}).get("quantized_layers", "")),
        f"{100 * steps['work']['share']:.2f} %" if "share" in steps.get("work", {}) else "",
        _passed(steps.get("train")),
        _evaluated(steps.get("evaluate")),
        f"{steps['export']['seconds']:.0f} s" if steps.get("export", {}).get("ok") else _passed(steps.get("export")),
        _runtime(steps.get("runtime", {})),
        verdict(row).replace("|", "\\|").replace("<", "&lt;"),
    ]


def _inputs(shapes: list[list[int]]) -> str:
    texts = [" x ".join(map(str, shape)) for shape in shapes]
    return f"{len(texts)} of {texts[0]}" if len(texts) > 1 else "".join(texts)


def _passed(step: dict[str, Any] | None) -> str:
    return "" if step is None else "ok" if step["ok"] else "fails"


def _evaluated(step: dict[str, Any] | None) -> str:
    """How near answers without gradients are to those with them, and which batches the model refuses either way."""
    if step is None or "gaps" not in step:
        return _passed(step)
    gap, refused = max(step["gaps"].values(), default=0.0), "; ".join(f"{name} refused" for name in step["refused"])
    return f"{f'off by {gap:.0e}' if gap else 'equal'}{f' ({refused})' if refused else ''}"


def _runtime(step: dict[str, Any]) -> str:
    if "integers" not in step:
        return _passed(step or None)
    differing = f"{step['differing']:,} of {step['integers']:,} integers differ"
    by = f", by up to {step['largest']}" if step["differing"] else ""
    return f"{differing}{by}; arg max {step['arg_max_equal']:,} of {step['arg_max_compared']:,}"


def _enough(row: dict[str, Any]) -> bool:
    return bool(row["steps"].get("work", {}).get("share", 0.0) >= ENOUGH)


def _conditions(rows: list[dict[str, Any]]) -> str:
    """On what it was measured, in a line."""
    known = [row for row in rows if "versions" in row]
    if not known:
        return ""
    versions = sorted({", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in known})
    threads = sorted({row["machine"]["threads"] for row in known})
    seconds = sum(row["seconds"] for row in rows)
    older = sum("files_of" in row for row in rows)
    dates, commits = ([*dict.fromkeys(row[key] for row in known if key in row)] for key in ("date", "commit"))
    return (
        f"\n{'; '.join(versions)}; {' or '.join(map(str, threads))} thread{'s' * (threads != [1])} a model,"
        f" {seconds / 60:.0f} minutes in all, at most {max(row.get('peak_gib', 0.0) for row in known):.1f} GiB;"
        f" {', '.join(dates)} at {', '.join(commits)}; the files of {older} as at an earlier commit.\n"
    )
