"""Promise: a damaged checkpoint is refused before anything is changed, and the message names the file."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import made, outcome, restore, save_two_steps
from tests.support.grids import small

DATA, INDEX = "__0_0.distcp", ".metadata"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two steps of a run."""
    one, two = save_two_steps(tmp_path_factory.mktemp("saved"))
    return one, two


@pytest.fixture
def damaged(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first step, to be damaged."""
    restore(saved[0], tmp_path / "c")
    return tmp_path / "c"


# --- damage at random positions --------------------------------------------------------------------


def flip_bit(data: bytearray, at: int, chance: random.Random) -> None:
    data[at] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, at: int, chance: random.Random) -> None:
    end = min(len(data), at + chance.choice([1, 4, 8, 64, 512]))
    data[at:end] = b"\0" * (end - at)


def truncate(data: bytearray, at: int, _: random.Random) -> None:
    del data[at:]


def extend(data: bytearray, _: int, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice([1, 8, 4096]))


def delete_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    del data[at : at + chance.choice([1, 2, 16])]


def insert_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.randbytes(chance.choice([1, 2, 16]))


def repeat_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = data[at : at + chance.choice([64, 512])]


def swap_bytes(data: bytearray, at: int, chance: random.Random) -> None:
    other = chance.randrange(len(data))
    data[at], data[other] = data[other], data[at]


DAMAGE: list[Callable[[bytearray, int, random.Random], None]] = [
    flip_bit,
    overwrite,
    truncate,
    extend,
    delete_bytes,
    insert_bytes,
    repeat_bytes,
    swap_bytes,
]


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [DATA, INDEX])
@small(lambda seed: seed == 0)
def test_damage_at_any_position_is_refused(damaged: Path, name: str, damage: Any, seed: int) -> None:
    chance = random.Random(f"{name} {damage.__name__} {seed}")
    file = damaged / name
    whole = file.read_bytes()
    for _ in range(25):
        data = bytearray(whole)
        at = chance.randrange(len(data))
        damage(data, at, chance)
        if bytes(data) == whole:
            continue
        file.write_bytes(data)
        found = outcome(damaged)
        assert name in found, f"{damage.__name__} at {at}: {found}"
        assert not found.startswith(("loaded", "changed"))
    file.write_bytes(whole)
    assert outcome(damaged) == "same"


def test_the_three_faults_of_a_hostile_trial_are_refused(damaged: Path) -> None:
    data = (damaged / DATA).read_bytes()
    weight = made(1)[0].get_parameter("weight").detach().numpy().tobytes()
    at = data.index(weight)
    (damaged / DATA).write_bytes(data[: at + 7] + bytes([data[at + 7] ^ 0x40]) + data[at + 8 :])
    assert outcome(damaged) == (
        f"its file {DATA} is damaged: bytes 0 to {len(data) - 1} do not have the checksum in the index"
    )
    (damaged / DATA).write_bytes(data)
    index = (damaged / INDEX).read_bytes()
    at = index.index(b"K\x00K\x00", index.index(b"offsets\x94h"))
    (damaged / INDEX).write_bytes(index[: at + 1] + b"\x40" + index[at + 2 :])
    assert outcome(damaged) == f"its index {INDEX} is damaged: ValueError: its checksum is wrong"
    (damaged / INDEX).write_bytes(b"\x80\x04Nr" + (0x14000000).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert outcome(damaged) == f"its index {INDEX} is damaged: UnpicklingError: operation 'r' is not allowed"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


# --- files that are exchanged ----------------------------------------------------------------------


def test_files_of_another_step_are_refused_even_without_checksums(
    saved: tuple[Path, Path], damaged: Path
) -> None:
    _, other = saved
    for name, problem in (
        (DATA, f"its file {DATA} is damaged, or belongs to another checkpoint"),
        (INDEX, DATA),
    ):
        restore(saved[0], damaged)
        shutil.copy(other / name, damaged / name)
        for verify in (True, False):
            assert problem in outcome(damaged, verify_checksums=verify)


def test_missing_files_links_and_odd_files_are_refused(damaged: Path, tmp_path: Path) -> None:
    (damaged / DATA).rename(tmp_path / "moved")
    assert outcome(damaged) == f"its file {DATA} is missing; every rank must see the same file system"
    (damaged / DATA).symlink_to(tmp_path / "nowhere")
    assert f"its file {DATA} is missing" in outcome(damaged)
    for odd in ("/dev/zero", os.devnull, str(tmp_path)):
        (damaged / DATA).unlink()
        (damaged / DATA).symlink_to(odd)
        assert f"its file {DATA} is missing" in outcome(damaged)
    (damaged / DATA).unlink()
    os.mkfifo(damaged / DATA)
    assert f"its file {DATA} is missing" in outcome(damaged)
    (damaged / DATA).unlink()
    (damaged / DATA).symlink_to(tmp_path / "moved")
    assert outcome(damaged) == "same"
    (damaged / INDEX).unlink()
    assert f"it has no {INDEX}, which is written last" in outcome(damaged)
    os.mkfifo(damaged / INDEX)
    assert f"it has no {INDEX}, which is written last" in outcome(damaged)


def test_an_index_that_is_larger_than_all_data_is_not_read(damaged: Path) -> None:
    with (damaged / INDEX).open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file
    assert "more than all data files together" in outcome(damaged)
