"""The documents are true: their Python runs and prints what they show, commands run, links and tables are real."""

import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.api_pages import ROOMS, api_pages
from benchmarks.document import DOCUMENTS, with_tables
from benchmarks.reference_table import PLACES
from qat.cli import command
from qat.quantizer import registry
from qat.training import script as train

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TUTORIAL = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
SESSIONS = {
    **{f"docs/{name}.md": [f"docs/{name}.md"] for name in (
        "rules", "models", "training_loop", "timm_and_huggingface", "coming_over", "own_data", "start",
        "curves", "fpga",
    )},
    "README.md": ["README.md"],
}  # fmt: skip
"""Pages that run by themselves. docs/run_folder.md needs a run: tests/loading/test_loading.py; docs/many_ranks.md
torchrun: tests/ranks/test_torchrun.py."""
SLOW = {f"docs/{name}.md": [f"docs/{name}.md"] for name in ("deploying", "detection", "low_bits")}
SLOW |= {"docs/tutorial": TUTORIAL}
"""The tutorial's chapters are one session."""

FENCE = re.compile(r"^( *)```([\w ]+)\n(.*?)^ *```\n(?:\n?^ *```text\n(.*?)^ *```\n)?", re.DOTALL | re.MULTILINE)
SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Random weights, so the statistics of BatchNorm stay as calibration saw them: else scales collapse in two steps.
SHORT = [
    "float.epochs=0", "qat.epochs=1", "qat.lr=1e-6", "qat.freeze_bn_epoch=0", "data.limit_train=32",
    "data.limit_val=16", "data.batch_size=16", "quantization.calibration_batches=1",
]  # fmt: skip


TRAINED = {
    "docs/own_data.md": [], "docs/tutorial": [],
    "docs/start.md": [*SHORT, "model.weights=null", "model.name=squeezenet1_1", "data.workers=0", "data.image_size=64"],
}  # fmt: skip
"""Where `python train.py` and `python -m qat` run the files of the page, and what makes that short."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The names of a session that stands in a folder of its own; rules that it registers are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))
    module = types.ModuleType("session")
    monkeypatch.setitem(sys.modules, "session", module)  # the compiler of torch 2.11 imports what it traces
    for name in ("my_rules", "my_data", "my_model"):
        monkeypatch.setitem(sys.modules, name, module)  # so that what the page imports is gone afterwards
        monkeypatch.delitem(sys.modules, name)
    torch.manual_seed(0)
    torch.compiler.reset()
    return module


@pytest.mark.parametrize("name", [*SESSIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_page_runs_and_prints_what_it_shows(name: str, session: types.ModuleType, tmp_path: Path) -> None:
    pages = (SESSIONS | SLOW)[name]
    blocks = [(page, *block) for page in pages for block in FENCE.findall((ROOT / page).read_text())]
    for _, _, language, code, _ in blocks:
        file = re.match(r"# (\w+\.(?:py|yaml))\n", code)
        if file and language in ("python", "yaml"):
            with (tmp_path / file[1]).open("a") as opened:
                opened.write(code)
    for page, indent, language, code, shown in blocks:
        code = textwrap.dedent(code)
        if language == "python sketch":
            compile(code, page, "exec")
        elif language == "python" and not code.startswith("# my_"):
            run = compile(code, page, "exec")
            check_output(page, run, session, textwrap.dedent(shown).removeprefix(indent))
        elif language == "bash" and name in TRAINED:
            for line in re.findall(r"^python train\.py (?!.*cuda).*$", code, re.MULTILINE):
                assert train.main([*line.split()[2:], *TRAINED[name], "device=cpu"]) == 0, line
            for line in re.findall(r"^python -m qat .*$", code, re.MULTILINE):
                assert command.main(line.split()[3:]) == 0, line


def check_output(page: str, run: types.CodeType, session: types.ModuleType, shown: str) -> None:
    """Run a block, and compare what it prints if the page shows it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(run, vars(session))
    same = doctest.OutputChecker().check_output(shown, printed.getvalue(), SHOWN)
    assert not shown or same, f"{page} shows:\n{shown}\nand prints:\n{printed.getvalue()}"


@pytest.mark.slow
@pytest.mark.parametrize("line", re.findall(r"python train\.py .*", README))
def test_the_readmes_commands_run(tmp_path: Path, line: str) -> None:
    words = [word for word in line.split()[1:] if not word.startswith("qat.epochs")]
    command = [sys.executable, str(ROOT / words[0]), *words[1:], *SHORT]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert list(tmp_path.glob("runs/*/summary.json"))


def test_the_readme_is_short_and_its_test_line_is_that_of_ci() -> None:
    assert len(README.splitlines()) <= 140
    (line,) = re.findall(r"^pip install .*python -m pytest$", README, re.MULTILINE)
    assert line.replace(".[test]", r"\.\[test\]") in (ROOT / ".ci" / "run").read_text()
    (name,) = re.findall(r'^name = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert name != "qat" and f"called `{name}`" in README  # `pip install qat` is another package


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_the_measured_ones(name: str) -> None:
    document = (ROOT / name).read_text()
    assert document.count("<!-- table: ") == document.count("<!-- end -->") > 0
    assert with_tables(document) == document


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*written, *(f"api/{room}.md" for room in ROOMS)])


def test_every_public_name_has_its_place_in_the_api() -> None:
    shown = [name for page in api_pages().values() for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert len(shown) == len(set(shown)) and set(PLACES[1:]) <= set(shown)
    names = {name for place in PLACES for name in importlib.import_module(place).__all__}
    assert names <= {name.rpartition(".")[2] for name in shown}


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lost = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
            there = page if not target else page.parent / target
            known = target.startswith("http") or there.exists()
            if known and anchor and there.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
                known = anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            lost += [] if known else [f"{page.relative_to(ROOT)}: {target}#{anchor}"]
    assert not lost


def test_troubleshooting_quotes_the_messages() -> None:
    source = "".join(path.read_text() for path in (ROOT / "qat").rglob("*.py"))
    said = re.sub(r'"\s+f?"', "", source)  # sentences go over lines
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 15 and [message for message in quoted if message not in said] == []
