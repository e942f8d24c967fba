"""Promise: training continues bitwise equal from a checkpoint on any other number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

from penstock.runtime import load_checkpoint, save_checkpoint
from tests.support.checkpointing import Bits, Found, Layout, bits, together, train
from tests.support.grids import small
from tests.support.pool import Pools

ZBV = Layout("zbv", 8)
OTHERS = {
    "two ranks with 1F1B": (2, Layout("1f1b", 2)),
    "one rank with a pipeline": (1, Layout("1f1b", 1)),
    "one rank with the plain module": (1, Layout()),
    "the same four ranks": (4, ZBV),
    "two ranks with shards": (2, Layout(sharded=True)),
    "four ranks with shards of tensor-parallel layers": (4, Layout(sharded=True, tensor_parallel=True)),
}


@pytest.fixture(scope="module", params=["adamw", "sgd"])
def saved(
    request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Found, list[float]]:
    """A checkpoint after two steps on four ranks, what is in it, and the three losses that followed."""
    path = str(tmp_path_factory.mktemp("saved") / "step-2")
    found = together(pools(4).run(train, ZBV, request.param, range(2), None, path))
    whole = together(pools(4).run(train, ZBV, request.param, range(5)))
    assert whole.losses[:2] == found.losses
    return path, request.param, found, whole.losses[2:]


@pytest.mark.parametrize("other", OTHERS)
@small(lambda saved, other: saved == "adamw" and other == "two ranks with 1F1B")
def test_training_continues_in_another_layout(
    pools: Pools, saved: tuple[str, str, Found, list[float]], other: str
) -> None:
    path, optimizer, stored, losses = saved
    ranks, layout = OTHERS[other]
    found = together(pools(ranks).run(train, layout, optimizer, range(2, 5), path))
    assert found.extra == {"step": 2}
    assert found.model == stored.model
    assert found.optimizer == stored.optimizer
    assert found.losses == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("other", [(1, Layout()), (4, Layout(sharded=True)), (2, Layout("1f1b", 2))])
@small(lambda other: other[0] == 1)
def test_shards_can_be_loaded_on_any_number_of_ranks(
    pools: Pools, tmp_path: Path, other: tuple[int, Layout]
) -> None:
    path = str(tmp_path / "sharded")
    stored = together(pools(2).run(train, Layout(sharded=True), "adamw", range(2), None, path))
    ranks, layout = other
    found = together(pools(ranks).run(train, layout, "adamw", range(2, 4), path))
    assert (found.model, found.optimizer) == (stored.model, stored.optimizer)
    again = together(pools(2).run(train, Layout(sharded=True), "adamw", range(2, 4), path))
    assert (again.model, again.optimizer) == (stored.model, stored.optimizer)
    assert found.losses == pytest.approx(again.losses, abs=1e-6)


def keep_factors(path: str) -> list[Bits]:
    """Of a sharded weight, a state with one number for each column, and one that counts."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for starts in (True, False):
        model: Any = fully_shard(nn.Linear(3, 4, bias=False), mesh=mesh)
        optimizer = SGD(model.parameters())
        if starts:
            columns = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
            optimizer.state[model.weight] = {"columns": columns, "step": torch.tensor(5.0), "seen": 7}
            save_checkpoint(path, model, optimizer)
        else:
            load_checkpoint(path, model, optimizer)
        state = optimizer.state[model.weight]
        assert isinstance(state["columns"], DTensor)
        found += [bits(state["columns"]), bits(state["step"]), bits(torch.tensor(state["seen"]))]
    return found


def test_state_of_another_shape_than_its_sharded_weight_is_restored(pools: Pools, tmp_path: Path) -> None:
    wanted = [bits(torch.arange(3.0)), bits(torch.tensor(5.0)), bits(torch.tensor(7))]
    assert pools(2).run(keep_factors, str(tmp_path / "c")) == [[*wanted, *wanted]] * 2


def save_empty_shards(path: str) -> list[Bits]:
    """A sharded layer with fewer rows than ranks, an empty tensor, and one number."""
    mesh = init_device_mesh("cpu", (4,))
    found = []
    for starts in (True, False):
        torch.manual_seed(1 if starts else 2)
        model: Any = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=mesh)
        model.register_buffer("empty", torch.empty(0, 4))
        model.register_buffer("scale", torch.tensor(1.5 if starts else 2.5))
        if starts:
            save_checkpoint(path, model)
        else:
            load_checkpoint(path, model)
        found += [bits(value) for value in model.state_dict().values()]
    return found


def test_ranks_without_a_part_of_a_tensor_save_and_load(pools: Pools, tmp_path: Path) -> None:
    for found in pools(4).run(save_empty_shards, str(tmp_path / "c")):
        assert found[:6] == found[6:]
