"""The site's API pages: a page a room, with the docstring of every public name whose definition stands in that room."""

import inspect
import re
from types import ModuleType

from benchmarks.reference_table import PLACES, public_names

ROOMS = {
    "prepare": (
        "Prepare and calibrate", ("workflow", "calibration", "batch_norm", "switches", "preparation", "loading"),
    ),
    "recipe": ("Recipes and targets", ("recipe", "spec", "targets")),
    "quantizers": ("Quantizers", ("quantizer",)),
    "layers": ("Layers", ("layers",)),
    "functional": ("Estimators", ("functional",)),
    "finetuning": ("Fine-tuning", ("finetuning",)),
    "post_training": ("Post-training steps", ("post_training",)),
    "analysis": ("Analysis", ("analysis",)),
    "export": ("Export", ("export", "integers")),
    "testing": ("Testing", ("testing",)),
    "kernels": ("Kernels", ("kernels",)),
}  # fmt: skip
"""File, title and modules of each page. A public name of a module that stands nowhere here is an error."""


def api_pages() -> dict[str, str]:
    """Paths on the site and their Markdown: lines for mkdocstrings, which puts the docstrings there."""
    entries: dict[str, list[str]] = {page: [] for page in ROOMS}
    for name, (value, place) in public_names().items():
        if not inspect.ismodule(value):
            entries[_page_of(value, place)] += [name, *_function_classes(value)]
    for place in reversed(PLACES[1:]):
        entries[_page_of(None, place)].insert(0, place)
    return {
        f"api/{page}.md": f"# {title}\n\n" + "".join(map(_entry, dict.fromkeys(entries[page])))
        for page, (title, _) in ROOMS.items()
    }


def _page_of(value: object, place: str) -> str:
    written = value if inspect.isclass(value) or inspect.isroutine(value) else None
    room = (inspect.unwrap(written).__module__ if written else place).split(".")[1]
    return next(page for page, (_, modules) in ROOMS.items() if room in modules)


def _function_classes(value: object) -> list[str]:
    """The autograd Functions that a docstring names: they hold the formula of the backward."""
    module = inspect.getmodule(value)
    named = re.findall(r"`(\w+Function)`", (inspect.isroutine(value) and value.__doc__) or "")
    return [f"{module.__name__}.{name}" for name in named if isinstance(module, ModuleType) and hasattr(module, name)]


def _entry(name: str) -> str:
    options = []
    if name in PLACES:
        options = ["members: false", "show_root_full_path: true"]
    elif name not in public_names():  # a Function: its formula, and not the methods that compute it
        options = ["members: false"]
    lines = ["    options:", *(f"      {option}" for option in options)] if options else []
    return "\n".join([f"::: {name}", *lines]) + "\n\n"
