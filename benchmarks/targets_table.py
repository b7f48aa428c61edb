"""The tables of docs/targets.md: the target profiles and their reasons, read from the data, not typed."""

from typing import Any

from benchmarks.kept import table
from qat.targets import PROFILES
from qat.targets.profile import GridLimits, TargetProfile


def targets_table() -> str:
    """One row a target in Markdown: the grids that it takes by default, and its operations."""
    titles = ("target", "weights", "activations", "inputs and output on one grid", "stays in float", "integer outputs")
    rows = [
        (
            f"`{profile.name}`", str(profile.weight), str(profile.activation), named(profile.shared_grids),
            named(profile.float_operations), shown(profile.quantizes_outputs),
        )
        for profile in PROFILES.values()
    ]  # fmt: skip
    return table(titles, rows)


def limits_table() -> str:
    """One row a target and tensor: the grids that a recipe may ask for."""
    titles = ("target", "tensor", "bits", "lowest integer", "signed", "symmetric", "granularity")
    rows = []
    for profile in PROFILES.values():
        for tensor in ("weight", "activation"):
            limits: GridLimits = getattr(profile, f"{tensor}_limits")
            ways = (" or ".join(map(shown, each)) for each in (limits.signed, limits.symmetric))
            bits, granularities = f"at most {limits.most_bits}", ", ".join(limits.granularities)
            rows.append((f"`{profile.name}`", tensor, bits, str(limits.lowest), *ways, granularities))
    return table(titles, rows)


def reasons_table() -> str:
    """One row a reason: the choice, why, and the page that says so."""
    rows = [
        (f"`{profile.name}`", f"`{key}`", choice(profile, key), reason.text, linked(reason.source))
        for profile in PROFILES.values()
        for key, reason in profile.reasons.items()
    ]
    return table(("target", "field", "choice", "because", "source"), rows)


def choice(profile: TargetProfile, key: str) -> str:
    """The value that a reason is about: `activation.signed` is a field of the limits, `activation` of the profile."""
    tensor, _, limit = key.partition(".")
    value: Any = getattr(getattr(profile, f"{tensor}_limits"), limit) if limit else getattr(profile, key)
    if isinstance(value, dict):
        return named(frozenset(value))
    if isinstance(value, frozenset):
        return named(value)
    return " or ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)


def shown(value: object) -> str:
    """A value as a reader says it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def named(operations: frozenset[Any]) -> str:
    """Operations in alphabetical order."""
    return ", ".join(sorted(operations)) or "none"


def linked(source: str) -> str:
    """The source as a link; this library where there is none."""
    if source.startswith("https://"):
        host, _, path = source.removeprefix("https://").partition("/")
        page = path.rstrip("/").rpartition("/")[2]
        return f"[{host}: {page}]({source})"
    return f"[{source}](../{source})" if source.endswith(".md") else source or "this library"
