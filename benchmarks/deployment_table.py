"""The kept rows of the deployment benchmark as tables for docs/deploying.md."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.deployment_rows import COMPARISON, RESULT
from benchmarks.speed_rows import Row, comparison, kept
from benchmarks.speed_table import NOTHING, conditions_of

ENGINES = {
    "eval": "torch, `eval()`",
    "convert_reference": '`convert(..., "reference")`',
    "convert_onednn": "`convert`",
    "onnxruntime": "ONNX Runtime, exact session",
    "onnxruntime_default": "ONNX Runtime, default session",
    "openvino": "OpenVINO",
    "litert_xnnpack": "LiteRT, XNNPACK",
    "litert_reference": "LiteRT, reference kernels",
    "litert_micro": "TensorFlow Lite Micro",
}
FILES = {"float": "float", "ai_edge_quantizer": "ai-edge-quantizer", "qat": "qat"}


def evaluation_table() -> str:
    """A line a model, batch and processor: milliseconds of float, and ratios to it."""
    variants = {"float_contiguous": "float, contiguous", "eval": "`eval()`", "convert": "`convert`", "plain": "plain"}
    return _ratios("evaluation", "float", {"float": "float", **variants}, ())


def onnxruntime_table() -> str:
    """A line a model, batch, session and processor: milliseconds of quantize_static's file, and ratios to it."""
    variants = {"quantize_static": "`quantize_static`", "float": "float", "qat": "qat"}
    return _ratios("onnxruntime", "quantize_static", variants, ("session",))


def engines_table() -> str:
    """A table a model and processor, a line an engine."""
    parts = []
    for rows in _comparisons("engines"):
        lines = [
            f"{rows[0]['subject']}, {rows[0]['samples']:,} images, {_processor(rows[0])}:",
            "",
            "| engine | top-1 | equal classes | other class, a tie | largest gap of a logit |"
            " integers that differ | largest | beyond ties |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            name = ENGINES[row["variant"]]
            if "missing" in row:
                lines.append(f"| {name} | {row['missing'].replace('|', '/')} | | | | | | |")
                continue
            cells = [
                f"{row['top1']:.2f}",
                f"{row['equal']:,}",
                f"{row['ties']:,}",
                f"{row['largest_gap']:.2g}",
                *_integers(row),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return _with_conditions("\n\n".join(parts), "engines")


def tflite_table() -> str:
    """A line a model, file and processor."""
    lines = ["| model | file | size | top-1 | time |", "|---|---|---:|---:|---:|"]
    for rows in _comparisons("tflite"):
        for row in sorted(rows, key=lambda row: list(FILES).index(row["variant"])):
            top1 = f"{row['top1']:.2f}" if "top1" in row else ""
            subject = f"{row['subject']}, {row['size']} px, {_processor(row)}"
            size = f"{row['bytes'] / 1e3:,.0f} kB"
            lines.append(f"| {subject} | {FILES[row['variant']]} | {size} | {top1} | {_time(row)} |")
    return _with_conditions("\n".join(lines), "tflite")


def _ratios(case: str, base: str, variants: dict[str, str], more: Sequence[str]) -> str:
    heads = ["model", "processor", *more, *variants.values()]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * (2 + len(more)) + "---:|" * len(variants)]
    for rows in _comparisons(case):
        one, found = rows[0], {row["variant"]: row for row in rows}
        subject = f"{one['subject']}, batch {one['batch']}, {one['size']} px"
        cells = [subject, _processor(one), *(one[name] for name in more)]
        cells += [_time(found[name]) if name in found else "" for name in variants]
        lines.append(f"| {' | '.join(cells)} |")
    return _with_conditions("\n".join(lines), case)


def _time(row: Row) -> str:
    """Milliseconds of the base, a ratio to it of others."""
    if "missing" in row:
        return "-"
    return f"{1000 * row['seconds']:.3g} ms" if row["variant"] == row["base"] else f"{row['ratio']:.2f}"


def _integers(row: Row) -> list[str]:
    if "integers" not in row:
        return ["", "", ""]
    share = f"{row['differing']:,} of {row['integers']:,} ({100 * row['differing'] / row['integers']:.4f} %)"
    return [share, str(row["largest"]), f"{row['beyond_ties']:,}"]


def _processor(row: Row) -> str:
    return "VNNI" if row["vnni"] else "no VNNI"


def _comparisons(case: str) -> Iterator[list[Row]]:
    rows = [row for row in kept(RESULT) if row["case"] == case]
    for key in dict.fromkeys(comparison(row, COMPARISON) for row in rows):
        yield [row for row in rows if comparison(row, COMPARISON) == key]


def _with_conditions(table: str, case: str) -> str:
    rows = [row for row in kept(RESULT) if row["case"] == case]
    if not rows:
        return NOTHING
    seen = dict.fromkeys(f"{_processor(row)}: {conditions_of(row)}; {row['date']}." for row in rows)
    return f"{table}\n\n" + "\n\n".join(seen) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "deployment_evaluation": evaluation_table,
    "deployment_onnxruntime": onnxruntime_table,
    "deployment_engines": engines_table,
    "deployment_tflite": tflite_table,
}
"""What docs/deploying.md marks."""
