"""A small language model trained by a pipeline inside of other parallelisms, compared with one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock import Schedule
from penstock.runtime import Pipeline
from tests.support.meshes import mesh_of_ranks
from tests.support.reference import Outcome, differences

WORDS, WIDTH, HEADS, LENGTH, ROWS = 24, 16, 4, 6, 2
PADDING = -100
MAX_NORM = 0.5


@dataclass(frozen=True)
class Composed:
    """A schedule and the dimensions of the mesh that it is one of."""

    schedule: Schedule
    data: str = ""
    """How stages are replicated: fsdp, hsdp, ddp, replicate, replicate-fsdp, replicas, or not at all."""
    replicas: int = 1
    tp: int = 1
    tied: bool = False
    steps_together: int = 1
    """How many calls of step() come before the optimizer's."""
    checkpointed: bool = False
    tokens: bool = False
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    """Of FSDP."""
    steps: int = 3
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        s = self.schedule
        extras = [name for name in ("tied", "checkpointed", "tokens") if getattr(self, name)]
        return (
            f"{s.name} m={s.microbatches} pp{s.num_ranks} {self.data or 'data'}{self.replicas} tp{self.tp} "
            f"together={self.steps_together} {' '.join(extras)}"
        )


class Attention(nn.Module):
    """With separate projections, so that each can be cut by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size = WIDTH // HEADS
        q, k, v = (each(x).view(rows, length, -1, size).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return result


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            again: Tensor = checkpoint(self._computed, x, use_reentrant=False)
            return again
        return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.words(self.norm(x))
        return result


def stages_of(case: Composed, count: int) -> dict[int, nn.Module]:
    """The same weights on every rank, under names that are unique in the whole model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        embed, head = nn.Embedding(WORDS, WIDTH), Head()
        blocks = [Block(checkpointed=case.checkpointed) for _ in range(count)]
    if case.tied:
        head.words.weight = embed.weight
    stages = [nn.Sequential() for _ in range(count)]
    stages[0].add_module("embed", embed)
    for index, block in enumerate(blocks):
        stages[index].add_module(f"block{index}", block)
    stages[-1].add_module("head", head)
    return {index: stage.to(case.dtype) for index, stage in enumerate(stages)}


def batch_of(case: Composed, step: int, part: int) -> tuple[Tensor, Tensor]:
    """All rows of all replicas."""
    rows = ROWS * case.schedule.microbatches * case.replicas
    generator = torch.Generator().manual_seed(100 * step + part)
    text = torch.randint(WORDS, (rows, LENGTH + 1), generator=generator)
    x, y = text[:, :-1], text[:, 1:].clone()
    if case.tokens:
        lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
        y[torch.arange(LENGTH) >= lengths] = PADDING
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def count_tokens(target: Tensor) -> int:
    return int((target != PADDING).sum())


# --- in one process --------------------------------------------------------------------------------


@dataclass
class Alone:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    state: dict[str, Tensor]


@cache
def train_alone(case: Composed) -> Alone:
    """The whole batch in one process, with plain autograd."""
    stages = stages_of(case, case.schedule.num_stages)
    model = nn.Sequential()
    for stage in stages.values():
        for name, child in stage.named_children():
            model.add_module(name, child)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = Alone([], [], [], {})
    pieces = case.schedule.microbatches * case.replicas
    for step in range(case.steps):
        for part in range(case.steps_together):
            x, y = batch_of(case, step, part)
            whole = 0.0
            for xs, ys in zip(x.chunk(pieces), y.chunk(pieces)):
                share = count_tokens(ys) / count_tokens(y) if case.tokens else 1 / pieces
                piece = loss(model(xs), ys) * share
                piece.backward()  # type: ignore[no-untyped-call]
                whole += float(piece.detach())
            found.losses.append(whole)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.gradients.append(gradients)
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    found.state = {name: value.clone() for name, value in model.state_dict().items()}
    return found


# --- composed --------------------------------------------------------------------------------------


def mesh_of(case: Composed) -> DeviceMesh:
    """Pp is the outermost, tp the innermost."""
    sizes = {"pp": case.schedule.num_ranks}
    if case.data == "hsdp":
        sizes |= {"replicate": 2, "shard": case.replicas // 2}
    elif case.data:
        sizes["data"] = case.replicas
    if case.tp > 1:
        sizes["tp"] = case.tp
    return mesh_of_ranks(**sizes)


def parallelized(case: Composed, stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A stage of this rank with everything around it but the pipeline."""
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


def data_place(case: Composed, mesh: DeviceMesh) -> int:
    """Which replica this rank is."""
    if case.data == "hsdp":
        return int(mesh.get_local_rank("replicate")) * (case.replicas // 2) + int(mesh.get_local_rank("shard"))
    return int(mesh.get_local_rank("data")) if case.data else 0


def pipeline_of(case: Composed, **options: Any) -> tuple[Pipeline, DeviceMesh]:
    mesh = mesh_of(case)
    hosts = case.schedule.placement.stage_to_rank
    here = mesh.get_local_rank("pp") if mesh.ndim > 1 else dist.get_rank()
    stages = {
        index: parallelized(case, stage, mesh) if hosts[index] == here else stage
        for index, stage in stages_of(case, case.schedule.num_stages).items()
    }
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
    return Pipeline(stages, case.schedule, **given), mesh


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
    """Train as the case says on this rank, and compare with one process."""
    wanted, outcome = train_alone(case), Outcome()
    pipeline, mesh = pipeline_of(case)
    names = {"head.words.weight": "embed.weight"} if case.tied else {}
    with closing(pipeline):
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=case.tp == 1)
        for step in range(case.steps):
            for part in range(case.steps_together):
                last = part == case.steps_together - 1
                x, y = (
                    all_.chunk(case.replicas)[data_place(case, mesh)] for all_ in batch_of(case, step, part)
                )
                with nullcontext() if last else pipeline.accumulate():
                    result = pipeline.step(x, target=y)
                outcome.losses.append(result.loss)
                right = wanted.losses[step * case.steps_together + part]
                if result.loss is None or abs(result.loss - right) > 1e-9:
                    outcome.faults.append(f"step {step}.{part}: loss {result.loss}, not {right}")
            for name, gradient in gradients(pipeline):
                right_gradient = wanted.gradients[step][names.get(name, name)]
                outcome.faults += differences(
                    f"step {step}", {name: gradient}, {name: right_gradient}, exact=False, slack=100
                )
            norm = float(pipeline.clip_grad_norm_(MAX_NORM))
            if abs(norm - wanted.norms[step]) > 1e-9 * wanted.norms[step]:
                outcome.faults.append(f"step {step}: norm {norm}, not {wanted.norms[step]}")
            optimizer.step()
            optimizer.zero_grad()
        for name, value in states(pipeline):
            outcome.faults += differences(
                "state", {name: value}, {name: wanted.state[name]}, exact=False, slack=1000
            )
    return outcome
