"""Tensor-parallel models: a transformer in several ways, and stages that pass on DTensors of all placements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from tests.support.models import TASKS, Batch, Task, made, next_word, numbers, seeded

WIDTH, HEADS, WORDS = 16, 4, 12

Plan = Mapping[str, Any]


# --- the model, which knows nothing of ranks --------------------------------------------------------


class Attention(nn.Module):
    """As many heads as there are in what the layers give: with tensor parallelism, this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=place == 3) for place in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feed = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed(self.norm2(x))
        return result


class Ends(nn.Module):
    """A block, after the words in the first stage and before the head in the last."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH) if index == count - 1 else None
        self.head = nn.Linear(WIDTH, WORDS) if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x if self.words is None else self.words(x))
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _batch(length: int, step: int, m: int, _dtype: torch.dtype) -> Batch:
    words = torch.randint(0, WORDS, (2 * m, length + 1), generator=seeded(900 + step))
    return Batch((words[:, :-1].contiguous(),), words[:, 1:].contiguous())


for _length in (5, 6):
    TASKS[f"transformer, {_length} words"] = Task(made(Ends), partial(_batch, _length), next_word, bits="never")


# --- how it is parallel -----------------------------------------------------------------------------


class Everywhere(ParallelStyle):
    """Every rank has all of the weights."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def replicated(*, local: bool, head: Any) -> Plan:
    """Between the parallel layers, every rank has all of it."""
    whole = partial(RowwiseParallel, output_layouts=Replicate(), use_local_output=local)
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), use_local_output=local),
        **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
        "block.attention.out": whole(),
        "block.feed.up": ColwiseParallel(),
        "block.feed.down": whole(),
        "head": head(Replicate()),
        **({} if local else dict.fromkeys(("block.norm1", "block.norm2", "norm"), Everywhere())),
    }


def by_sequence(*, local: bool, head: Any) -> Plan:
    """Between the parallel layers, every rank has a piece of the sequence."""
    pieces = partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=local)
    gathered = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    norm = partial(SequenceParallel, use_local_output=local)
    return {
        "words": pieces(input_layouts=Replicate()),
        "block.norm1": norm(),
        "block.attention": gathered(),
        **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
        "block.attention.out": pieces(),
        "block.norm2": norm(),
        "block.feed": gathered(),
        "block.feed.up": ColwiseParallel(),
        "block.feed.down": pieces(),
        "norm": norm(),
        "head": head(Shard(1)),
    }


def whole_logits(layout: Any) -> Any:
    return ColwiseParallel(input_layouts=layout, output_layouts=Replicate())


def logits_by_word(layout: Any) -> Any:
    return ColwiseParallel(input_layouts=layout, output_layouts=Shard(-1), use_local_output=False)


def parallel(plan: Plan, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    there = {name: style for name, style in plan.items() if _has(module, name)}
    return parallelize_module(module, mesh, there)


def _has(module: nn.Module, name: str) -> bool:
    for part in name.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module is not None


# --- values of all kinds ----------------------------------------------------------------------------


class Crossing(nn.Module):
    """Passes on a tree of tensors; once it is `spread`, they are DTensors of all placements, and plain ones."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index, self.is_last = index, index == count - 1
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.mesh: DeviceMesh | None = None
        self.seen: set[str] = set()
        """The placements of gradients."""

    def forward(self, given: Any) -> Any:
        h = torch.tanh(self.layer(self.plain(given if self.index == 0 else self.opened(**given))))
        if self.mesh is None:
            everywhere = pieces = h
        else:
            everywhere = DTensor.from_local(h, self.mesh, [Replicate()])
            pieces = everywhere.redistribute(placements=[Shard(1)])
        if self.is_last:
            return pieces
        total = pieces.sum(1)
        if total.requires_grad:
            for each in (everywhere, pieces, total):
                hooked: Any = each
                hooked.register_hook(lambda gradient: self.seen.add(str(getattr(gradient, "placements", ""))))
        return {
            "pieces": pieces,
            "others": [total, (everywhere, h)],
            "fixed": pieces.detach(),
            "unused": total * 2,
        }

    def opened(self, pieces: Tensor, others: Any, fixed: Tensor, unused: Tensor) -> Tensor:
        total, (everywhere, h) = others
        for value, wanted in ((pieces, "S(1)"), (total, "P(sum)"), (everywhere, "R"), (fixed, "S(1)"), (h, "")):
            if self.mesh is not None:
                placed = ", ".join(map(str, getattr(value, "placements", ())))
                assert placed == wanted, f"{placed}, not {wanted}"
        assert fixed.requires_grad is False
        assert unused.requires_grad is h.requires_grad
        mixed = self.plain(everywhere @ self.weight)  # sharded by columns, so the gradient is a sum to be made
        around: Tensor = self.plain(pieces.sin()) + self.plain(fixed) / 2 + self.plain(total)[:, None]
        result: Tensor = around + mixed + h / 3
        return result

    def plain(self, value: Tensor) -> Tensor:
        return value.redistribute(placements=[Replicate()]).to_local() if isinstance(value, DTensor) else value

    def spread(self, mesh: DeviceMesh) -> nn.Module:
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(1)]))
        return self


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Of DTensors that every rank has a piece of, a sum that is not yet made."""
    if isinstance(output, DTensor) and not isinstance(target, DTensor):
        target = distribute_tensor(target, output.device_mesh, output.placements)
    error: Tensor = output - target
    return (error * error).sum() / output.numel()  # torch's mse_loss takes pieces for equally long


def _numbers(step: int, m: int, dtype: torch.dtype) -> Batch:
    return Batch(
        (numbers(50 + step, 2 * m, 5, WIDTH, dtype=dtype),), numbers(80 + step, 2 * m, 5, WIDTH, dtype=dtype)
    )


TASKS["crossing"] = Task(made(Crossing), _numbers, squared, bits="never")
TASKS["feed forward"] = Task(made(lambda *_: FeedForward()), _numbers, squared, bits="never")
