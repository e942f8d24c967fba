"""Ways to train with tensor parallelism inside of stages, each compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel

from penstock import Schedule
from penstock.runtime import Pipeline
from tests.support.meshes import mesh_of_ranks
from tests.support.models import TASKS
from tests.support.reference import (
    TIMEOUT,
    Outcome,
    Trained,
    differences,
    from_rank_0,
    optimizer_of,
    train_plainly,
)
from tests.support.tensor_models import (
    Crossing,
    Plan,
    by_sequence,
    logits_by_word,
    parallel,
    replicated,
    whole_logits,
)


@dataclass(frozen=True)
class Way:
    """What is trained, how a stage becomes parallel, how the batch is given and the loss computed."""

    task: str
    parallel: Callable[[Any, DeviceMesh], nn.Module]
    loss: Callable[[], AbstractContextManager[None]] = nullcontext
    placed: Any = None
    """The placement of the batch; None for plain tensors."""


def _transformer(plan: Plan, loss: Any = nullcontext, task: str = "transformer, 6 words") -> Way:
    return Way(task, partial(parallel, plan), loss)


WAYS = {
    "replicated": _transformer(replicated(local=True, head=whole_logits)),
    "replicated dtensors": _transformer(replicated(local=False, head=whole_logits)),
    "pieces": _transformer(by_sequence(local=True, head=whole_logits)),
    "pieces as dtensors": _transformer(by_sequence(local=False, head=whole_logits)),
    "uneven pieces": _transformer(by_sequence(local=False, head=whole_logits), task="transformer, 5 words"),
    "loss parallel": _transformer(by_sequence(local=False, head=logits_by_word), loss_parallel),
    "all kinds": Way("crossing", Crossing.spread),
    "a batch of dtensors": Way("crossing", Crossing.spread, placed=Replicate()),
    "a batch sharded by rows": Way("crossing", Crossing.spread, placed=Shard(0)),
    "results under way": Way(
        "feed forward", partial(parallel, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ),
}


def mesh_of(pp: int, dp: int, tp: int) -> DeviceMesh:
    return mesh_of_ranks(pp=pp, dp=dp, tp=tp)


# --- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorCase:
    schedule: Schedule
    way: str
    tp: int = 2
    dp: int = 1
    """Replicas, each with rows of its own; with more than one, all weights are sharded by FSDP too."""
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    steps: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the pipeline."""

    def __str__(self) -> str:
        s = self.schedule
        about = f"{s.name} pp={s.num_ranks} dp={self.dp} tp={self.tp} stages={s.num_stages} m={s.microbatches}"
        return f"{about} {self.way} {self.optimizer}"


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(case: TensorCase) -> Outcome:
    """Train as the case says on this rank, and compare all that is sharded, put together, with one process."""
    schedule, way = case.schedule, WAYS[case.way]
    task, m = TASKS[way.task], schedule.microbatches
    plain = way.task, case.optimizer, case.dtype, case.steps, schedule.num_stages, m * case.dp
    wanted: Trained = from_rank_0(train_plainly, *plain)
    mesh = mesh_of(schedule.num_ranks, case.dp, case.tp)
    outcome = Outcome()
    stages = task.stages(schedule.num_stages, case.dtype)
    own = schedule.placement.stages_of_rank[mesh["pp"].get_local_rank()]
    stages = [way.parallel(stages[index], mesh["tp"]) for index in own]
    if case.dp > 1:
        for each in stages:
            fully_shard(each, mesh=mesh["dp"])
    pipeline = Pipeline(stages, schedule, loss=task.loss, group=mesh["pp"], timeout=TIMEOUT, **case.options)
    with closing(pipeline):
        optimizing = optimizer_of(case.optimizer, pipeline.parameters())
        for step in range(case.steps):
            batch = task.batch(step, m * case.dp, case.dtype)
            x, target = (
                rows.tensor_split(case.dp)[mesh["dp"].get_local_rank()] for rows in (*batch.args, batch.target)
            )
            if way.placed is not None:
                x, target = (distribute_tensor(given, mesh["tp"], [way.placed]) for given in (x, target))
            with way.loss():
                result = pipeline.step(x, target=target)
            outcome.losses.append(result.loss)
            assert result.loss is not None
            most = 1e-12 if case.dtype is torch.float64 else 1e-6
            if abs(result.loss - wanted.totals[step]) > most * abs(wanted.totals[step]):
                outcome.problems.append(f"step {step}: loss {result.loss}, not {wanted.totals[step]}")
            for stage, module in pipeline.modules.items():
                got = {key: whole(weight.grad) for key, weight in module.named_parameters()}
                where = f"step {step} stage {stage} gradient"
                right = wanted.gradients[step][stage]
                outcome.problems += differences(where, got, right, exact=False, slack=10 if step else 1)
            optimizing.step()
            optimizing.zero_grad()
        for stage, module in pipeline.modules.items():
            state = {key: whole(value) for key, value in module.state_dict().items()}
            outcome.problems += differences(
                f"stage {stage}", state, wanted.states[stage], exact=False, slack=10
            )
    return outcome
