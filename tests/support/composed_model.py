"""A small language model for compositions of parallelisms, and its training in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import Schedule

WORDS, WIDTH, HEADS, LENGTH, ROWS = 24, 16, 4, 6, 2
PADDING = -100
MAX_NORM = 0.5


@dataclass(frozen=True)
class Composed:
    """A schedule, and the other dimensions of the mesh."""

    schedule: Schedule
    data: str = ""
    """How stages are replicated: fsdp, hsdp, ddp, replicate, replicate-fsdp, replicas, or empty for not."""
    replicas: int = 1
    tp: int = 1
    tied: bool = False
    accumulated: int = 1
    """The number of pipeline steps per optimizer step."""
    checkpointed: bool = False
    tokens: bool = False
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    """The mixed precision of FSDP."""
    steps: int = 2
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        s = self.schedule
        extras = [name for name in ("tied", "checkpointed", "tokens") if getattr(self, name)]
        return (
            f"{s.name} m={s.microbatches} pp{s.num_ranks} {self.data or 'data'}{self.replicas} tp{self.tp} "
            f"accumulated={self.accumulated} {' '.join(extras)}"
        )


class Attention(nn.Module):
    """With separate projections, so that tensor parallelism can split each by heads."""

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


@dataclass
class SingleProcess:
    """The results of training in one process."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    state: dict[str, Tensor]


@cache
def train_single_process(case: Composed) -> SingleProcess:
    """The whole batch in one process, with plain autograd."""
    stages = stages_of(case, case.schedule.num_stages)
    model = nn.Sequential()
    for stage in stages.values():
        for name, child in stage.named_children():
            model.add_module(name, child)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = SingleProcess([], [], [], {})
    pieces = case.schedule.microbatches * case.replicas
    for step in range(case.steps):
        for part in range(case.accumulated):
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
