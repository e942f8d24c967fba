"""Promise: a checkpoint without checksums (format 1) is loaded with one warning, and most damage is noticed."""

from __future__ import annotations

import random
import resource
import warnings
from pathlib import Path

import pytest
import torch

from penstock.runtime import load_checkpoint, save_checkpoint
from tests.support.checkpoints import error_of
from tests.support.damage import DAMAGE, OLD_CHECKPOINTS, made, outcome, restore
from tests.support.grids import small
from tests.support.pool import Pools

NAMES = ["one_rank", "two_ranks"]


@pytest.mark.parametrize("name", NAMES)
def test_an_old_checkpoint_is_loaded_with_one_warning(tmp_path: Path, name: str) -> None:
    with pytest.warns(
        UserWarning, match="was saved by an older version of Penstock and has no checksums"
    ) as seen:
        assert outcome(OLD_CHECKPOINTS / name) == "same"
    assert len(seen) == 1
    assert seen[0].filename.endswith("damage.py")  # the caller of load_checkpoint
    model, optimizer = made(1)
    save_checkpoint(tmp_path / "c", model, optimizer, extra={"step": 7})
    assert outcome(tmp_path / "c") == "same"


def load_old() -> tuple[int, list[float]]:
    model, optimizer = made(5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load_checkpoint(OLD_CHECKPOINTS / "two_ranks", model, optimizer)
    return len(seen), model.get_parameter("bias").tolist()


def test_only_the_first_rank_warns(pools: Pools) -> None:
    assert pools(2).run(load_old) == [(1, [-1.0, -2.0]), (0, [-1.0, -2.0])]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
@small(lambda seed, name: seed == 0 and name == "two_ranks")
@pytest.mark.filterwarnings("ignore:the checkpoint")
def test_damage_is_refused_or_harmless(tmp_path: Path, name: str, seed: int) -> None:
    restore(OLD_CHECKPOINTS / name, tmp_path / "c")
    chance = random.Random(seed)
    for _ in range(30):
        file = chance.choice(sorted((tmp_path / "c").iterdir()))
        whole = file.read_bytes()
        data = bytearray(whole)
        at, damage = chance.randrange(len(data)), chance.choice(DAMAGE)
        damage(data, at, chance)
        file.write_bytes(data)
        found = outcome(tmp_path / "c")
        assert not found.startswith(("loaded", "changed")), f"{damage.__name__}, {file.name} at {at}"
        file.write_bytes(whole)


def test_a_pickle_that_would_fill_memory_is_refused(tmp_path: Path) -> None:
    restore(OLD_CHECKPOINTS / "one_rank", tmp_path / "c")
    huge = (0x14000000).to_bytes(4, "little")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for operations in (
        b"Nr" + huge,  # LONG_BINPUT: a memo of that size
        b"\x8e" + huge + bytes(4),  # BINBYTES8
        b"\x96" + huge + bytes(4),  # BYTEARRAY8
        b"\x8a\xff",  # LONG1
        b"X" + huge,  # BINUNICODE
        b"\x95" + huge + bytes(4),  # FRAME
        b"]" + b"2" * 64,  # DUP
    ):
        (tmp_path / "c" / ".metadata").write_bytes(b"\x80\x04" + operations + b".")
        assert "its index .metadata is damaged" in outcome(tmp_path / "c")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_pickle_cannot_change_classes(tmp_path: Path) -> None:
    """BUILD with a class instead of an object would set attributes of the class."""
    restore(OLD_CHECKPOINTS / "one_rank", tmp_path / "c")
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    (tmp_path / "c" / ".metadata").write_bytes(b"\x80\x04" + name + b"N}\x8c\x03bad\x88s\x86b.")
    assert "its index .metadata is damaged" in outcome(tmp_path / "c")
    assert not hasattr(torch.distributed.checkpoint.metadata.Metadata, "bad")


def test_a_new_checkpoint_without_its_checksums_is_not_an_old_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", *made(1))
    index = tmp_path / "c" / ".metadata"
    content = index.read_bytes()
    index.write_bytes(content[: content.index(b'{"files"')])
    (problem,) = error_of(tmp_path / "c", *made(5))
    assert "its index .metadata is damaged: bytes of these files belong to no entry" in problem
