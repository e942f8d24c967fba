"""A pipeline composed with tensor and data parallelism, trained and compared with one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock.runtime import Pipeline
from tests.support.composed_model import (
    MAX_NORM,
    Block,
    Composed,
    SingleProcess,
    batch_of,
    count_tokens,
    loss,
    stages_of,
    train_single_process,
)
from tests.support.meshes import mesh_of_ranks
from tests.support.reference import Outcome, differences, from_rank_0


def mesh_of(case: Composed) -> DeviceMesh:
    """The mesh, from pp (outermost) to tp (innermost)."""
    sizes = {"pp": case.schedule.num_ranks}
    if case.data == "hsdp":
        sizes |= {"replicate": 2, "shard": case.replicas // 2}
    elif case.data:
        sizes["data"] = case.replicas
    if case.tp > 1:
        sizes["tp"] = case.tp
    return mesh_of_ranks(**sizes)


def parallelized(case: Composed, stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A stage with tensor and data parallelism."""
    if case.tp > 1:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan["attention.out"] = RowwiseParallel()
        for block in stage.children():
            if isinstance(block, Block):
                parallelize_module(block, mesh["tp"], plan)
    if case.data in ("fsdp", "hsdp"):
        dims: Any = ("replicate", "shard") if case.data == "hsdp" else "data"
        for block in stage.children():
            if isinstance(block, Block):
                fully_shard(block, mesh=mesh[dims], mp_policy=case.policy)
        fully_shard(stage, mesh=mesh[dims], mp_policy=case.policy)
    elif case.data == "replicate-fsdp":
        replicate_with_fsdp(stage, mesh=mesh["data"])
    elif case.data == "replicate":
        replicate(stage, process_group=mesh.get_group("data"))
    elif case.data == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group("data"))
    return stage


def replica_index(case: Composed, mesh: DeviceMesh) -> int:
    """The index of this rank among the replicas."""
    if case.data == "hsdp":
        return int(mesh.get_local_rank("replicate")) * (case.replicas // 2) + int(mesh.get_local_rank("shard"))
    return int(mesh.get_local_rank("data")) if case.data else 0


def parallel_stages(case: Composed, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """All stages; those of this rank are parallelized."""
    hosts = case.schedule.placement.stage_to_rank
    here = mesh.get_local_rank("pp") if mesh.ndim > 1 else dist.get_rank()
    return {
        index: parallelized(case, stage, mesh) if hosts[index] == here else stage
        for index, stage in stages_of(case, case.schedule.num_stages).items()
    }


def pipeline_of(case: Composed, **options: Any) -> tuple[Pipeline, DeviceMesh]:
    mesh = mesh_of(case)
    return pipeline_of_stages(case, parallel_stages(case, mesh), mesh, **options), mesh


def pipeline_of_stages(
    case: Composed, stages: dict[int, nn.Module], mesh: DeviceMesh, **options: Any
) -> Pipeline:
    tied = [{0: "embed.weight", max(stages): "head.words.weight"}] if case.tied else []
    given = {
        "loss": loss,
        "tokens": count_tokens if case.tokens else None,
        "group": mesh["pp"] if mesh.ndim > 1 else mesh,
        "replicas": mesh["data"] if case.data == "replicas" else None,
        "tied": tied,
        "timeout": 20.0,
        **options,
    }
    return Pipeline(stages, case.schedule, **given)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clean(name: str) -> str:
    return name.removeprefix("module.")


def gradients(pipeline: Pipeline) -> Iterator[tuple[str, Tensor]]:
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield clean(name), full(parameter.grad).clone()


def states(pipeline: Pipeline) -> Iterator[tuple[str, Tensor]]:
    for module in pipeline.modules.values():
        for name, value in module.state_dict().items():
            yield clean(name), full(value).clone()


def train_composed(case: Composed) -> Outcome:
    """Train the case on this rank, and compare with one process."""
    wanted: SingleProcess = from_rank_0(train_single_process, case)
    outcome = Outcome()
    pipeline, mesh = pipeline_of(case)
    names = {"head.words.weight": "embed.weight"} if case.tied else {}
    with closing(pipeline):
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=case.tp == 1)
        for step in range(case.steps):
            for part in range(case.accumulated):
                last = part == case.accumulated - 1
                x, y = (
                    all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, step, part)
                )
                with nullcontext() if last else pipeline.accumulate():
                    result = pipeline.step(x, target=y)
                outcome.losses.append(result.loss)
                right = wanted.losses[step * case.accumulated + part]
                if result.loss is None or abs(result.loss - right) > 1e-9:
                    outcome.problems.append(f"step {step}.{part}: loss {result.loss}, not {right}")
            for name, gradient in gradients(pipeline):
                right_gradient = wanted.gradients[step][names.get(name, name)]
                outcome.problems += differences(
                    f"step {step}", {name: gradient}, {name: right_gradient}, exact=False, slack=100
                )
            norm = float(pipeline.clip_grad_norm_(MAX_NORM))
            if abs(norm - wanted.norms[step]) > 1e-9 * wanted.norms[step]:
                outcome.problems.append(f"step {step}: norm {norm}, not {wanted.norms[step]}")
            optimizer.step()
            optimizer.zero_grad()
        for name, value in states(pipeline):
            outcome.problems += differences(
                "state", {name: value}, {name: wanted.state[name]}, exact=False, slack=1000
            )
    return outcome
