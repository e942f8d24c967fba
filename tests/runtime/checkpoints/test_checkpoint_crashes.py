"""Promise: after a crash during a save, the old or the new checkpoint is complete."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock import CheckpointError
from penstock.runtime import load_checkpoint, save_checkpoint
from tests.support.grids import small
from tests.support.pool import Pools


def filled(value: float) -> tuple[nn.Module, SGD]:
    """A model and an optimizer that have nothing but this number."""
    model = nn.Linear(3, 3, bias=False)
    optimizer = SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def save(path: Path, value: float) -> None:
    save_checkpoint(path, *filled(value), extra=value)


def load(path: Path) -> float:
    """The number that a checkpoint has, everywhere in it."""
    model, optimizer = filled(-1)
    value: float = load_checkpoint(path, model, optimizer)
    for parameter in model.parameters():
        assert (parameter == value).all()
        assert (optimizer.state[parameter]["momentum_buffer"] == value).all()
    return value


CHANGES: list[tuple[Any, str]] = [
    *((os, name) for name in ("fsync", "unlink", "rmdir")),
    *((Path, name) for name in ("mkdir", "rename", "unlink")),
    (torch, "save"),
]
"""What changes the disk."""

# --- a process that dies ---------------------------------------------------------------------------


def die_before(event: int) -> None:
    """Kill this process when it is about to change the disk for the so-manyeth time."""
    seen = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return function(*args, **kwargs)

        return call

    for owner, name in CHANGES:
        setattr(owner, name, watched(getattr(owner, name)))


def crash_everywhere(path: Path, before: str) -> list[float | None]:
    """What can be loaded after a crash at each event of a save, the last time after none."""
    path.parent.mkdir()
    found: list[float | None] = []
    finished = False
    while not finished:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        if before != "nothing":
            save(path, 1)
        if before == "one that stepped aside":  # and then the save was killed
            path.rename(path.with_name(".last.replaced"))
        child = os.fork()
        if child == 0:
            die_before(len(found))
            save(path, 2)
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        try:
            found.append(load(path))
        except CheckpointError:
            found.append(None)
        left = [each.name for each in path.parent.iterdir()]
        save(path, 3)
        assert load(path) == 3, f"after a crash that left {left}"
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    return found


@pytest.mark.parametrize("before", ["one", "one that stepped aside"])
@small(lambda before: before == "one")
def test_a_kill_at_any_time_leaves_the_old_or_new_checkpoint_and_the_next_save_cleans_up(
    pools: Pools, tmp_path: Path, before: str
) -> None:
    (found,) = pools(1).run(crash_everywhere, tmp_path / "runs" / "last", before)
    assert found == sorted(found)  # once the new one is there it stays
    assert set(found) == {1, 2}
    assert len(found) > 12


def test_a_kill_during_the_first_save_leaves_no_partial_checkpoint(pools: Pools, tmp_path: Path) -> None:
    (found,) = pools(1).run(crash_everywhere, tmp_path / "runs" / "last", "nothing")
    assert set(found) == {None, 2}
    assert found == sorted(found, key=lambda value: value or 0)


def save_and_lose_a_rank(path: Path) -> str:
    save(path, 1)
    if torch.distributed.get_rank() == 1:
        die_before(1)
    try:
        save(path, 2)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_is_killed_fails_the_save_on_the_other(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "last"
    message, _ = pools(2).run(save_and_lose_a_rank, path, lost=(1,))
    assert "rank 0 lost the connection to another rank" in message
    assert load(path) == 1


# --- a rank that fails -----------------------------------------------------------------------------


def save_on_a_full_disk(path: Path, where: str, full: int) -> tuple[str, float, list[str]]:
    """The second save fails on one rank."""
    save(path, 1)
    original = getattr(os, where)

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if torch.distributed.get_rank() == full:
        setattr(os, where, no_space)
    try:
        save(path, 2)
    except CheckpointError as error:
        setattr(os, where, original)
        torch.distributed.barrier()
        return str(error), load(path), sorted(each.name for each in path.parent.iterdir())
    raise AssertionError("it was saved")


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_rank_is_reported_on_all_and_the_old_checkpoint_stays(
    pools: Pools, tmp_path: Path, full: int
) -> None:
    path = tmp_path / "last"
    for message, value, names in pools(2).run(save_on_a_full_disk, path, "fsync", full):
        assert message.splitlines() == [
            f"the checkpoint {path} cannot be saved:",
            f"  rank {full}: OSError: [Errno 28] No space left on device",
        ]
        assert value == 1
        assert names == ["last"]


def changes_that_fail(event: int, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let one change of the disk fail; tells whether it did."""
    seen = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == event + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*args, **kwargs)

        return call

    for owner, name in CHANGES:
        patch.setattr(owner, name, watched(getattr(owner, name)))
    return lambda: seen > event


def test_an_error_at_any_time_leaves_the_old_or_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "last"
    found = []
    for event in range(100):
        save(path, 1)
        with monkeypatch.context() as patch:
            failed = changes_that_fail(event, patch)
            try:
                save(path, 2)
            except CheckpointError as error:
                assert "OSError: [Errno 5] Input/output error" in str(error)  # noqa: PT017
                assert failed()
            if not failed():
                break
        found.append(load(path))
    assert set(found) == {1, 2}
    assert found == sorted(found)
    assert load(path) == 2
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def save_with_little_space(path: Path, limit: int) -> str:
    """Save a model in a process that can write files of `limit` bytes at most."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save_checkpoint(path, nn.Linear(200, 200))
            os.write(write, b"saved")
        except CheckpointError as error:
            os.write(write, "\n".join(error.problems).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        os.waitpid(child, 0)
        return found.read()


def fill_the_disk_everywhere(path: Path, limits: list[int]) -> list[str]:
    save(path, 1)
    found = []
    for limit in limits:
        found.append(save_with_little_space(path, limit))
        assert load(path) == 1
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    return found


def test_a_disk_that_is_full_at_any_byte_is_the_cause_that_is_reported(pools: Pools, tmp_path: Path) -> None:
    limits = [0, 50, 200, 1000, 2000, 8000, 80_000, 160_000, 162_000]
    (found,) = pools(1).run(fill_the_disk_everywhere, tmp_path / "runs" / "last", limits)
    assert set(found) == {"rank 0: OSError: [Errno 27] File too large"}
