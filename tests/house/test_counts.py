"""What the house promises about itself, counted."""

import pytest

from qat.kernels.cpu import compiler
from tests.house import counts


def test_a_layer_alone_reaches_torch_round_in_six_files() -> None:
    assert len(counts.files_to_round()) <= 6


@pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
def test_a_fused_step_stays_in_two_rooms_and_what_torch_keeps_private() -> None:
    files = counts.files_of_a_step()
    assert len(files) <= 15
    assert {file.partition("/")[0] for file in files} == {"codes", "graph", "kernels", "torch_internals.py"}


def test_rooms_are_shallow() -> None:
    assert {room: chain for room, chain in counts.deepest_chains().items() if len(chain) > 6} == {}


def test_folders_are_small() -> None:
    assert counts.largest_folder(counts.PACKAGE)[0] <= 16
    assert counts.largest_folder(counts.ROOT / "tests")[0] <= 20
