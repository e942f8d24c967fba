"""Promise: damage to the files of one rank is refused by all ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint
from tests.support.pool import Pools


def load_after_damage(path: Path, name: str) -> tuple[str, bool]:
    """Each rank saves its own module; one file is damaged; both load."""
    rank = torch.distributed.get_rank()
    model = torch.nn.ModuleDict({str(rank): torch.nn.Linear(50, 50)})
    save_checkpoint(path, model)
    if rank == 0:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    torch.distributed.barrier()
    before = [parameter.detach().clone().add_(1) for parameter in model.parameters()]
    for parameter, value in zip(model.parameters(), before):
        parameter.data.copy_(value)
    try:
        load_checkpoint(path, model)
    except CheckpointError as error:
        return str(error), all(map(torch.equal, before, model.parameters()))
    return "loaded", False


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_every_rank_refuses_damage_to_the_data_of_one(pools: Pools, tmp_path: Path, name: str) -> None:
    for message, unchanged in pools(2).run(load_after_damage, tmp_path / "c", name):
        assert f"{name} is damaged" in message
        assert unchanged


def swap_shards(path: Path) -> tuple[str, str]:
    """Both ranks save a module of the same size; their files are exchanged."""
    rank = torch.distributed.get_rank()
    model = torch.nn.ModuleDict({str(rank): torch.nn.Linear(50, 50)})
    save_checkpoint(path, model)
    sizes = [(path / name).stat().st_size for name in ("__0_0.distcp", "__1_0.distcp")]
    torch.distributed.barrier()
    if rank == 0:
        (path / "__0_0.distcp").rename(path / "x")
        (path / "__1_0.distcp").rename(path / "__0_0.distcp")
        (path / "x").rename(path / "__1_0.distcp")
        if sizes[0] != sizes[1]:  # the first rank's has the header too
            for name, size in zip(("__0_0.distcp", "__1_0.distcp"), sizes):
                os.truncate(path / name, size)
    torch.distributed.barrier()
    found = []
    for verify in (True, False):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, model, verify_checksums=verify)
        found.append(str(caught.value))
    return found[0], found[1]


def test_exchanged_shards_are_refused_even_without_checksums(pools: Pools, tmp_path: Path) -> None:
    for messages in pools(2).run(swap_shards, tmp_path / "c"):
        for message in messages:
            assert "its file __0_0.distcp is damaged, or belongs to another checkpoint or rank" in message
            assert "its file __1_0.distcp is damaged, or belongs to another checkpoint or rank" in message


def load_own_copies(path: Path) -> str:
    """Each rank sees another directory under its path."""
    rank = torch.distributed.get_rank()
    own = path / str(rank)
    model = torch.nn.Linear(2, 2)
    for step in range(2):
        save_checkpoint(path / f"step-{step}", model)
    torch.distributed.barrier()
    own.symlink_to(path / f"step-{rank}")
    try:
        load_checkpoint(own, model)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_ranks_that_see_different_checkpoints_are_refused(pools: Pools, tmp_path: Path) -> None:
    for message in pools(2).run(load_own_copies, tmp_path):
        assert "the ranks read different checkpoints; every rank must see the same file system" in message


def load_damaged_copies(path: Path) -> tuple[str, bool]:
    """Each rank has its own copy, and that of rank 1 is damaged."""
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(50, 50)  # replicas: both ranks read all of it
    save_checkpoint(path / "c", model, extra=f"from rank {rank}")
    own = path / f"copy-{rank}"
    shutil.copytree(path / "c", own)
    assert load_checkpoint(own, model) == "from rank 0"
    if rank == 1:
        data = bytearray((own / "__0_0.distcp").read_bytes())
        data[data.index(model.weight.detach().numpy().tobytes())] ^= 1
        (own / "__0_0.distcp").write_bytes(data)
    before = model.weight.detach().add(1)
    model.weight.data.copy_(before)
    try:
        load_checkpoint(own, model)
    except CheckpointError as error:
        return str(error), torch.equal(before, model.weight)
    return "loaded", False


def test_a_rank_verifies_its_own_copy(pools: Pools, tmp_path: Path) -> None:
    for message, unchanged in pools(2).run(load_damaged_copies, tmp_path):
        assert "its file __0_0.distcp is damaged: bytes" in message
        assert unchanged
