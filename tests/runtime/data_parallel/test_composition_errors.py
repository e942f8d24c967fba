"""Promises on replicated stages that would train wrongly, and on steps that fail among replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock import PenstockError, build
from penstock.errors import StepFailedError
from penstock.runtime import Pipeline, split
from tests.support.composed_model import Composed, batch_of
from tests.support.composition import gradients, pipeline_of, replica_index
from tests.support.grids import small
from tests.support.meshes import mesh_of_ranks
from tests.support.pool import Pools

SCHEDULE = build("1f1b", ranks=2, microbatches=2)


def mesh_of_four() -> DeviceMesh:
    return mesh_of_ranks(pp=2, dp=2)


def stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def error_of(make: Callable[[], Pipeline]) -> str:
    try:
        make().close()
    except PenstockError as error:
        return str(error)
    return ""


def wrong() -> dict[str, str]:
    mesh = mesh_of_four()
    given: dict[str, Any] = {"loss": functional.mse_loss, "timeout": 15.0, "group": mesh["pp"]}

    def pipeline(module: nn.Module, **more: Any) -> Pipeline:
        return Pipeline([module], SCHEDULE, **(given | more))

    def sharded() -> Any:
        return fully_shard(stage(), mesh=mesh["dp"])

    def half_sharded() -> nn.Module:
        module = stage()
        fully_shard(module[0], mesh=mesh["dp"])
        return module

    def grouped() -> nn.Module:
        module = stage()
        fully_shard([module[0], module[1]], mesh=mesh["dp"])
        return module

    def hooked() -> nn.Module:
        module = DistributedDataParallel(stage(), process_group=mesh.get_group("dp"))
        module.register_comm_hook(None, allreduce_hook)
        return module

    def forgotten() -> Any:
        return sharded() if mesh.get_local_rank("pp") == 0 else stage()

    return {
        "half sharded": error_of(lambda: pipeline(half_sharded())),
        "grouped": error_of(lambda: pipeline(grouped())),
        "hooked": error_of(lambda: pipeline(hooked())),
        "forgotten": error_of(lambda: pipeline(forgotten())),
        "two dimensions": error_of(lambda: pipeline(stage(), replicas=mesh)),
        "no replicas": error_of(lambda: pipeline(sharded(), replicas=mesh["pp"])),
        "mesh does not fit": error_of(
            lambda: Pipeline([stage()], build("1f1b", ranks=4, microbatches=4), **given)
        ),
    }


def test_inconsistent_replicas_are_rejected_on_every_rank(pools: Pools) -> None:
    for messages in pools(4).run(wrong):
        assert "data of one rank alone" in messages["half sharded"]
        assert "1.weight, 1.bias" in messages["half sharded"]
        assert "fully_shard on the whole stage module" in messages["grouped"]
        assert "communication hook" in messages["hooked"]
        assert "replicas of its stages: rank 0: 2; rank 1: 1" in messages["forgotten"]
        assert "mesh of 2 dimensions (pp, dp)" in messages["two dimensions"]
        assert "replicas= names all ranks" in messages["no replicas"]
        assert "is for 4 ranks, but the process group has 2" in messages["mesh does not fit"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 1, 3), "stage 2 is missing in `stages`, which has 0, 1, 3 of 4"),
        ((0, 1, 2, 3, 4), "stage 4 is not among them, and would never run"),
        ((0, 3), "stages 1, 2 are missing in `stages`"),
        ((-1, 0, 1, 2, 3), "stage -1 is not among them, and would never run"),
    ],
)
def test_missing_or_extra_stages_are_rejected(given: tuple[int, ...], message: str) -> None:
    schedule = build("interleaved-1f1b", ranks=1, microbatches=2, stages_per_rank=4)
    with pytest.raises(PenstockError, match=message):
        Pipeline({index: nn.Linear(2, 2) for index in given}, schedule)


def layers(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    if tied:
        model[3].weight = model[0].weight
    return model


def wrong_cuts() -> dict[str, str]:
    mesh = mesh_of_ranks(pp=2)
    rank = dist.get_rank()
    given: dict[str, Any] = {"loss": functional.mse_loss, "timeout": 15.0, "group": mesh}

    def cut_elsewhere() -> list[nn.Module]:
        return [split(layers(), at=[("1", "3")[rank]])[rank]]

    def loop_for_a_v() -> list[nn.Module]:
        stages = split(layers(), at=["1", "2", "3"])
        return [stages[rank], stages[rank + 2]]

    zbv = build("zbv", ranks=2, microbatches=4)
    tied_on_one = split(layers(tied=rank == 0), at=["2"])
    return {
        "tied on one rank": error_of(lambda: Pipeline([tied_on_one[rank]], SCHEDULE, **given)),
        "cut elsewhere": error_of(lambda: Pipeline(cut_elsewhere(), SCHEDULE, **given)),
        "loop for a V": error_of(lambda: Pipeline(loop_for_a_v(), zbv, **given)),
        "too few stages": error_of(lambda: Pipeline(split(layers(), at=["2"]), "zbv", microbatches=4, **given)),
        "too many modules": error_of(lambda: Pipeline([layers(), layers()], "1f1b", microbatches=4, **given)),
        "its own replicas": error_of(lambda: Pipeline([layers()], SCHEDULE, replicas=mesh, **given)),
        "right": error_of(lambda: Pipeline([split(layers(), at=["1"])[rank]], SCHEDULE, **given)),
    }


def test_a_model_that_ranks_split_differently_is_rejected(pools: Pools) -> None:
    for rank, messages in enumerate(pools(2).run(wrong_cuts)):
        assert (
            "tied weights: rank 0: {0: '0.weight', 1: '3.weight'}; rank 1: none" in messages["tied on one rank"]
        )
        assert "split of the model: rank 0: 2 parameters, 0.weight to 0.bias | 6" in messages["cut elsewhere"]
        assert f"stage {rank + 2} of the model is given as stage {3 - rank}" in messages["loop for a V"]
        assert (
            "zbv on 2 ranks has 4 stages, 2 for each rank, but 2 modules are given, 1 for each rank: split the "
            "model into 4" in messages["too few stages"]
        )
        assert (
            "1f1b on 2 ranks has 2 stages, 1 for each rank, but 2 modules are given for this rank: give 1, or"
            in messages["too many modules"]
        )
        assert "ranks of this pipeline" in messages["its own replicas"]
        assert not messages["right"]


# --- failures --------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Fails in training when `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and x.requires_grad:
            raise ValueError("on purpose")
        return x


def recovered(data: str) -> list[str]:
    """A step fails in every replica; the next one has correct gradients."""
    case = Composed(build("zbv", ranks=2, microbatches=4), data, 2, tied=True)
    fresh, _ = pipeline_of(case)
    pipeline, mesh = pipeline_of(case)
    x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
    problems = []
    with closing(fresh), closing(pipeline):
        fresh.step(x, target=y)
        wanted = dict(gradients(fresh))
        part: Any = pipeline.modules.get(2)
        if part is not None:
            part.get_submodule("module" if data == "ddp" else "").append(Failing())
            failing = next(module for module in part.modules() if isinstance(module, Failing))
            failing.fails = True
        try:
            pipeline.step(x, target=y)
        except StepFailedError as error:
            if "on purpose" not in str(error):
                problems.append(str(error))
        else:
            problems.append("no failure")
        if part is not None:
            failing.fails = False
        for parameter in pipeline.parameters():
            parameter.grad = None
        dist.barrier()
        pipeline.step(x, target=y)
        for name, gradient in gradients(pipeline):
            if not torch.allclose(gradient, wanted[name], rtol=1e-9, atol=1e-12):
                problems.append(f"{name} is off by {float((gradient - wanted[name]).abs().max())}")
    return problems


@pytest.mark.parametrize("data", ["fsdp", "replicas", "ddp"])
@small(lambda data: data == "fsdp")
def test_replicas_continue_after_a_failed_step(pools: Pools, data: str) -> None:
    assert pools(4).run(recovered, data) == [[]] * 4


def clipped_by_some() -> str:
    case = Composed(build("1f1b", ranks=2, microbatches=4), "replicas", 2)
    pipeline, mesh = pipeline_of(case, timeout=2.0)
    x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
    message = ""
    with closing(pipeline):
        pipeline.step(x, target=y)
        if pipeline.rank == 0:
            try:
                pipeline.clip_grad_norm_(1.0)
            except PenstockError as error:
                message = str(error)
    return message


def test_a_rank_that_clips_alone_gets_an_error(pools: Pools) -> None:
    messages = pools(4).run(clipped_by_some)
    for text in messages[:2]:
        assert "clip_grad_norm_() failed on rank 0: every rank must call it" in text
