"""Building the C library, keeping it where nobody else can write, and what happens where it cannot be had."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qat.functional import lsq_quantize
from qat.kernels import choose
from qat.kernels.cpu import compiler

needs_kernels = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, and a library that is looked for anew."""
    tmp_path = tmp_path.resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.library.cache_clear()
    yield tmp_path / "qat" / "kernels"
    compiler.library.cache_clear()


def library_of_another_process() -> Path:
    program = "from qat.kernels.cpu import compiler; print(compiler.library()._name)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return Path(ran.stdout.strip())


@needs_kernels
def test_the_library_is_built_once_into_a_private_folder(fresh: Path) -> None:
    assert compiler.library() is not None
    (built,) = fresh.iterdir()
    assert built.suffix == ".so" and stat.S_IMODE(fresh.stat().st_mode) == 0o700
    changed = built.stat().st_mtime_ns
    compiler.library.cache_clear()
    assert compiler.library() is not None and built.stat().st_mtime_ns == changed


@needs_kernels
@pytest.mark.parametrize(("above", "mode"), [(0, 0o702), (0, 0o770), (2, 0o777)])
def test_a_folder_that_others_can_write_to_is_not_used(fresh: Path, above: int, mode: int) -> None:
    fresh.mkdir(parents=True)
    (fresh, *fresh.parents)[above].chmod(mode)
    used = library_of_another_process()
    assert used.parent.name.startswith("qat-kernels-") and list(fresh.iterdir()) == []
    assert not used.parent.exists()  # it was for that run only


COMPILERS = [(None, "no C compiler found"), ("false", "could not be built with false")]


@pytest.mark.parametrize(("command", "said"), COMPILERS)
def test_without_a_compiler_that_works_the_formula_runs_and_the_log_says_so(command, said, fresh, monkeypatch, caplog):
    monkeypatch.delenv("CC", raising=False)
    if command is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CC", command)
    with caplog.at_level(logging.WARNING, "qat.kernels"):
        y = lsq_quantize(torch.tensor([0.3, 9.0]), torch.tensor(0.5), -8, 7)
    assert y.tolist() == [0.5, 3.5] and compiler.library() is None
    assert len(caplog.messages) == 1 and said in caplog.text
    assert not fresh.exists() or list(fresh.iterdir()) == []


def test_the_kernels_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_KERNELS", "off")
    assert choose(torch.ones(5), torch.tensor(0.5)) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "opened", "linked"])
def test_only_a_whole_library_is_found(damage: str, tmp_path: Path) -> None:
    whole = bytes(range(256)) * 50
    (tmp_path / "new").write_bytes(whole)
    path = compiler.store(tmp_path / "new", tmp_path, "cpu-1")
    assert list(tmp_path.iterdir()) == [path] == [compiler.stored(tmp_path, "cpu-1")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and compiler.stored(tmp_path, "cpu-2") is None
    if damage == "linked":
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        changed = {"cut": whole[:5000], "changed": whole[:9000] + b"?" + whole[9001:], "emptied": b""}
        path.write_bytes(changed.get(damage, whole))
        path.chmod(0o722 if damage == "opened" else 0o700)
    assert compiler.stored(tmp_path, "cpu-1") is None and not path.is_symlink() and not path.exists()


@pytest.mark.parametrize(("uid", "taken"), [(os.getuid(), True), (0, True), (12345, False)])
def test_of_another_user_neither_folder_nor_library_is_used(uid, taken, fresh, monkeypatch):
    assert compiler.cache_folder() == fresh
    (fresh / "new").write_bytes(b"x")
    path, real = compiler.store(fresh / "new", fresh, "cpu-1"), Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        state = real(path, **options)
        return os.stat_result([*state[:4], uid, *state[5:]]) if path.is_relative_to(fresh) else state

    monkeypatch.setattr(Path, "stat", owned)
    assert (compiler.cache_folder() == fresh) is taken and (compiler.stored(fresh, "cpu-1") == path) is taken


def test_without_a_home_the_library_is_this_processs(fresh, monkeypatch, caplog):
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    with caplog.at_level(logging.INFO, "qat.kernels"):
        assert compiler.cache_folder() is None
    assert len(caplog.messages) == 1 and "/proc/.cache" in caplog.text
