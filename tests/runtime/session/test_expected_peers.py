"""Promise: no replica trains alone by mistake, created without `replicas=` or beside one that has closed."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.slowness import slowness

X = torch.arange(32.0).reshape(8, 4) / 32
FORGOTTEN = "but this pipeline was created without replicas="


def mesh_of(pp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, pp), mesh_dim_names=("dp", "pp"))


def pipeline_of(mesh: DeviceMesh, data: str = "replicas", **options: Any) -> Pipeline:
    """One of two replicas; with `data` of "" it is alone."""
    torch.manual_seed(0)
    pp = mesh["pp"].size()
    stages: dict[int, nn.Module] = {stage: nn.Linear(4, 4) for stage in range(pp)}
    if data == "fsdp":
        for module in stages.values():
            fully_shard(module, mesh=mesh["dp"])
    given: dict[str, Any] = {"loss": mse_loss, "timeout": 60, "group": mesh["pp"]}
    if data == "replicas":
        given["replicas"] = mesh["dp"]
    return Pipeline(stages, "1f1b", microbatches=4, **given | options)


def step(pipeline: Pipeline) -> object:
    return pipeline.step(X, target=X).loss


def steps_until_an_error(pipeline: Pipeline, seconds: float = 200) -> CallOutcome:
    end = time.monotonic() + seconds
    while not (outcome := attempt(lambda: step(pipeline))).error and time.monotonic() < end:
        time.sleep(0.02)
    return outcome


def forget(pp: int, data: str, timeout: float) -> tuple[list[CallOutcome], list[object]]:
    """The second replica is created as if it were alone; then both are created alike."""
    mesh = mesh_of(pp)
    dist.barrier()
    if mesh.get_local_rank("dp") == 0:
        outcomes = [attempt(lambda: pipeline_of(mesh, data, timeout=timeout))]
    else:
        with closing(pipeline_of(mesh, "")) as alone:
            outcomes = [steps_until_an_error(alone), attempt(lambda: step(alone))]
            outcomes.append(attempt(lambda: alone.clip_grad_norm_(1.0)))
    dist.barrier()
    with closing(pipeline_of(mesh, data)) as pipeline:
        losses = [step(pipeline)]
    with closing(pipeline_of(mesh, "")) as alone:
        losses.append(step(alone))
    return outcomes, losses


@pytest.mark.parametrize(("pp", "data"), [(1, "replicas"), (2, "replicas"), (1, "fsdp"), (2, "fsdp")])
@small(lambda pp, data: (pp == 2) == (data == "replicas"))
def test_a_replica_that_was_created_alone_is_told_that_another_expects_it(
    pools: Pools, pp: int, data: str
) -> None:
    results = pools(2 * pp).run(forget, pp, data, 2 * slowness())
    for rank, (outcomes, losses) in enumerate(results):
        for outcome in outcomes:
            print_report(f"rank {rank}: {outcome.error}: {outcome.text}")
            assert outcome.error in {"PipelineError", "StepFailedError"}
        assert losses == [losses[0]] * 2
    for (waited,), _ in results[:pp]:
        assert "trains the same stages in a pipeline that was created without replicas=" in waited.text
    for outcomes, _ in results[pp:]:
        assert all(FORGOTTEN in outcome.text for outcome in outcomes[:2])
        assert all("expects this rank among its replicas (world ranks " in each.text for each in outcomes[:2])


def connect_late() -> list[CallOutcome]:
    """The second replica first trains a model of the same shapes alone, while the first one waits for it."""
    mesh = mesh_of(2)
    outcomes = []
    alone = pipeline_of(mesh, "")
    if mesh.get_local_rank("dp"):
        for _ in range(6):
            outcomes.append(attempt(lambda: step(alone)))
            time.sleep(0.5)
    with closing(pipeline_of(mesh)) as pipeline, closing(alone):
        outcomes += [attempt(partial(step, each)) for each in (alone, pipeline, alone, pipeline)]
        pipeline.close()
        return [*outcomes, attempt(lambda: step(pipeline)), attempt(lambda: step(alone))]


def test_a_replica_may_connect_late_and_train_other_models(pools: Pools) -> None:
    for outcomes in pools(4).run(connect_late):
        assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)


def close_one_replica(pp: int, last: str) -> list[CallOutcome]:
    """The first replica closes its pipeline, which the second one does not; the second one calls again."""
    mesh = mesh_of(pp)
    with closing(pipeline_of(mesh)) as pipeline:
        outcomes = [attempt(lambda: step(pipeline))]
        if mesh.get_local_rank("dp") == 0:
            pipeline.close()
        elif last == "step":
            outcomes.append(attempt(lambda: step(pipeline)))
        else:
            outcomes.append(attempt(lambda: pipeline.clip_grad_norm_(1.0)))
        return [*outcomes, attempt(lambda: step(pipeline)), attempt(lambda: step(pipeline))]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("last", ["step", "clip"])
@small(lambda pp, last: (pp == 2) == (last == "step"))
def test_a_replica_that_has_closed_its_pipeline_is_named(pools: Pools, pp: int, last: str) -> None:
    results = pools(2 * pp).run(close_one_replica, pp, last)
    for rank, outcomes in enumerate(results):
        for outcome in outcomes:
            print_report(f"rank {rank}: {outcome.error}: {outcome.text}")
    for outcomes in results[:pp]:
        assert [outcome.error for outcome in outcomes] == [""] * 3
    for _, failed, again, more in results[pp:]:
        assert failed.error in {"PipelineError", "StepFailedError"}
        assert "trains the same stages and has closed its pipeline" in failed.text
        assert any(f"world rank {rank} trains" in failed.text for rank in range(pp))
        assert failed.seconds < SOON * slowness()
        assert again.error == more.error == ""
