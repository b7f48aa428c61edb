"""The rows of the deployment benchmark: how they are kept, and said in a line."""

import importlib.metadata

from benchmarks.speed_rows import RESULTS, Row, facts_of_run
from qat.kernels.cpu import onednn

RESULT = RESULTS / "deployment.jsonl"
PACKAGES = ("onnxruntime", "openvino", "ai-edge-litert", "tflite-micro")
COMPARISON = ("case", "subject", "batch", "size", "session", "vnni")
"""What rows of one comparison have in common."""

ANSWERS = ("top1", "equal", "ties", "largest_gap", "integers", "differing", "largest", "beyond_ties")
"""What a row of an engine has."""


def facts() -> Row:
    """What every row ends with; taken before measuring, so that `load` is that of others."""
    about = facts_of_run()
    about["versions"] |= {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)}
    return {"vnni": onednn.are_exact("dense"), **about}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def said(row: Row) -> str:
    """A row in one line, for the terminal."""
    about = {name: row[name] for name in COMPARISON[1:-1] if name in row}
    start = f"{row['case']} {about} {row['variant']}"
    if "missing" in row:
        return f"{start}: {row['missing']}"
    if "ratio" in row:
        spread = f"{row['low']:.2f} to {row['high']:.2f} in {row['rounds']} rounds"
        more = "".join(f", {name} {row[name]}" for name in ("bytes", "top1") if name in row)
        return f"{start}: {row['ratio']:.2f} of {row['base']} ({spread}), {1000 * row['seconds']:.2f} ms{more}"
    return f"{start}: " + ", ".join(f"{name} {row[name]}" for name in ANSWERS if name in row)
