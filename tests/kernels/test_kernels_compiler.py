"""Building the C library, keeping it where nobody else can write, and what happens where it cannot be had."""

import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qat.functional import lsq_quantize
from qat.kernels import choose
from qat.kernels.cpu import cache, compiler

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
def test_a_folder_that_others_can_write_to_is_not_used(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    used = library_of_another_process()
    assert used.parent.name.startswith("qat-kernels-") and list(fresh.iterdir()) == []
    assert not used.parent.exists()  # it was for that run only


def test_without_a_compiler_the_formula_runs_and_the_log_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING, "qat.kernels"):
        y = lsq_quantize(torch.tensor([0.3, 9.0]), torch.tensor(0.5), -8, 7)
    assert y.tolist() == [0.5, 3.5]
    assert len(caplog.messages) == 1 and "no C compiler found" in caplog.text


def test_a_compiler_that_fails_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING, "qat.kernels"):
        assert compiler.library() is None
    assert len(caplog.messages) == 1 and "could not be built with false" in caplog.text
    assert list(fresh.iterdir()) == []


def test_the_kernels_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_KERNELS", "off")
    assert choose(torch.ones(5), torch.tensor(0.5)) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "opened", "linked"])
def test_only_a_whole_library_is_found(damage: str, tmp_path: Path) -> None:
    whole = bytes(range(256)) * 50
    (tmp_path / "new").write_bytes(whole)
    path = cache.store(tmp_path / "new", tmp_path, "cpu-1")
    assert list(tmp_path.iterdir()) == [path] == [cache.stored(tmp_path, "cpu-1")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and cache.stored(tmp_path, "cpu-2") is None
    if damage == "linked":
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        changed = {"cut": whole[:5000], "changed": whole[:9000] + b"?" + whole[9001:], "emptied": b""}
        path.write_bytes(changed.get(damage, whole))
        path.chmod(0o722 if damage == "opened" else 0o700)
    assert cache.stored(tmp_path, "cpu-1") is None and not path.is_symlink() and not path.exists()


def test_a_compiler_that_hangs_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fake = tmp_path / "slow-cc"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo 1\n'
        f"echo > $TMPDIR/part.o\nsleep 100 & echo $! > {tmp_path}/child\nwait\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    monkeypatch.setattr(compiler, "SECONDS", 2)
    with caplog.at_level(logging.WARNING, "qat.kernels"):
        assert compiler.library() is None
    assert "timed out after 2 seconds" in caplog.messages[0] and len(caplog.messages) == 1
    assert list(fresh.iterdir()) == []
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    ends = time.monotonic() + 20  # a busy machine takes a moment to end what was killed; by itself it sleeps for 100 s
    while (running := child.exists() and "State:\tZ" not in (child / "status").read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not running


@pytest.mark.parametrize(
    ("home", "chosen", "reason"),
    [
        (None, None, "Could not determine home directory."),
        ("", None, "the home folder is '.'"),
        ("elsewhere", "relative/cache", "the home folder is 'elsewhere'"),
        ("/proc", None, "[Errno 2] No such file or directory: '/proc/.cache'"),
    ],
)
def test_without_a_home_the_library_is_this_processs(
    home: str | None, chosen: str | None, reason: str, fresh: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def unknown(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(unknown if home is None else lambda _: Path(home)))
    monkeypatch.setenv("XDG_CACHE_HOME", chosen or "")
    with caplog.at_level(logging.INFO, "qat.kernels"):
        assert cache.cache_folder() is None
    assert len(caplog.messages) == 1 and reason in caplog.text


@pytest.mark.parametrize("opened", ["qat/kernels", "qat", "."])
@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_every_folder_on_the_way_is_closed_to_others(
    fresh: Path, opened: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.cache_folder() == fresh
    (fresh.parents[1] / opened).chmod(mode)
    with caplog.at_level(logging.INFO, "qat.kernels"):
        assert cache.cache_folder() is None
    assert len(caplog.messages) == 1 and f"others can write to {fresh.parents[1] / opened})" in caplog.text


def test_in_a_sticky_folder_ones_own_are_safe_and_its_content_is_not(fresh: Path) -> None:
    assert cache.cache_folder() == fresh
    fresh.parents[1].chmod(0o1777)  # as /tmp
    assert cache.cache_folder() == fresh
    fresh.chmod(0o1777)
    assert cache.cache_folder() is None


def test_a_link_is_judged_by_where_it_leads(fresh: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "target").mkdir(parents=True)
    (tmp_path / "qat").symlink_to(shared / "target")
    assert cache.cache_folder() == tmp_path.resolve() / "shared" / "target" / "kernels"
    shared.chmod(0o777)
    assert cache.cache_folder() is None


def test_folders_of_another_user_or_group_are_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_folder() == fresh
    real = Path.lstat

    def given(uid: int, gid: int, mode: int) -> None:
        def lstat(path: Path) -> os.stat_result:
            state = list(real(path))
            if path == fresh.parent:
                state[0], state[4], state[5] = stat.S_IFDIR | mode, uid, gid
            return os.stat_result(state)

        monkeypatch.setattr(Path, "lstat", lstat)

    expected = {
        (os.getuid(), 54321, 0o775): None,
        (0, 0, 0o755): fresh,
        (12345, 0, 0o700): None,
        (0, 54321, 0o775): None,
    }
    for owner, folder in expected.items():
        given(*owner)
        assert cache.cache_folder() == folder


def test_folders_are_made_for_their_owner_whatever_the_umask(fresh: Path) -> None:
    before = os.umask(0)
    try:
        assert cache.cache_folder() == fresh
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(part.stat().st_mode) == 0o700 for part in (fresh, fresh.parent))
