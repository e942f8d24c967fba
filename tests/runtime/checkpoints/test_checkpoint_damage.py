"""Promise: a damaged checkpoint is refused before anything is changed, and the message names the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint
from penstock.runtime.checkpoints import files
from penstock.runtime.checkpoints.checkpoint import OptimizerRestore
from tests.support.damage import DAMAGE, forge_index, made, outcome, restore, save_two_steps
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


@pytest.mark.parametrize("seed", range(4))
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
    assert outcome(damaged) == f"its index {INDEX} is damaged: its checksum is wrong"
    (damaged / INDEX).write_bytes(b"\x80\x04Nr" + (0x14000000).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert outcome(damaged).startswith(f"its index {INDEX} is damaged, or another program wrote")
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


# --- what is verified ------------------------------------------------------------------------------


def flip_in(file: Path, values: torch.Tensor) -> None:
    """Flip a bit in these values of a data file."""
    data = bytearray(file.read_bytes())
    data[bytes(data).index(values.detach().numpy().tobytes())] ^= 1
    file.write_bytes(data)


def test_data_that_is_not_loaded_is_verified_too(damaged: Path) -> None:
    model, optimizer = made(1)
    flip_in(damaged / DATA, optimizer.state[model.weight]["momentum_buffer"])
    with pytest.raises(CheckpointError, match=f"its file {DATA} is damaged"):
        load_checkpoint(damaged, model)


def test_without_checksums_only_the_contents_are_not_checked(damaged: Path) -> None:
    whole = (damaged / DATA).read_bytes()
    flip_in(damaged / DATA, made(1)[0].weight)
    assert outcome(damaged, verify_checksums=False) == "loaded, wrong: ['weight']"
    (damaged / DATA).write_bytes(whole[:-1])
    assert f"its file {DATA} is truncated" in outcome(damaged, verify_checksums=False)
    (damaged / DATA).write_bytes(b"P" + whole[1:])
    assert f"its file {DATA} is damaged, or belongs to another" in outcome(damaged, verify_checksums=False)
    (damaged / DATA).write_bytes(whole)
    forge_index(damaged, lambda index: index["entries"].pop("model.bias") and None)
    assert "bytes of these files belong to no entry" in outcome(damaged, verify_checksums=False)


def test_every_block_of_a_large_file_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 1000)
    save_checkpoint(tmp_path / "c", *made(1), extra={"step": 7})
    file = tmp_path / "c" / DATA
    whole = file.read_bytes()
    starts = range(0, len(whole), 1000)
    assert len(starts) > 5
    for start in starts:
        end = min(start + 1000, len(whole))
        for at in {max(start, 100), end - 1}:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert f"bytes {start} to {end - 1} do not have the checksum" in outcome(tmp_path / "c")
    file.write_bytes(whole[:1500] + bytes(each ^ 1 for each in whole[1500:2500]) + whole[2500:])
    assert f"bytes 1000 to 1999 (and 1 more of {len(starts)} blocks) do not have" in outcome(tmp_path / "c")
    file.write_bytes(whole)
    assert outcome(tmp_path / "c") == "same"


def test_a_disk_error_names_the_file(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.open

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("buffering") == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    assert outcome(damaged) == f"its file {DATA} cannot be read: [Errno 5] Input/output error"


def test_a_read_that_fails_after_the_checks_is_reported(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(5)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(OptimizerRestore, "finish", fail)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(damaged, model, optimizer)
    assert list(caught.value.problems) == [
        "rank 0: OSError: [Errno 5] Input/output error",
        "the model may have been changed in part: load other weights before it is used",
    ]


@pytest.mark.parametrize("at", [1, 2])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_noticed(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """By another job; the first read is that of the header, the second that of the tensors."""
    reads = 0
    original = state_dict_loader.load

    def load_later(*args: Any, **kwargs: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == at:
            save_checkpoint(damaged, *made(2), extra={"step": 8})
        original(*args, **kwargs)

    monkeypatch.setattr(files, "load", load_later)
    with pytest.raises(CheckpointError, match="it was replaced while it was read: load it again"):
        load_checkpoint(damaged, *made(5))


def test_the_tools_of_torch_read_a_checkpoint(damaged: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(damaged, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(plain["model.weight"], made(1)[0].weight)
