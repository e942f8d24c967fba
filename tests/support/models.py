"""The tasks that the distributed tests train: small models as lists of stages, batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.model_layers import (
    WIDTH,
    WORDS,
    Block,
    Checkpointed,
    Dropping,
    Embedding,
    Nested,
    Pair,
    Repeated,
    Tied,
    seeded,
)

__all__ = [
    "MODELS",
    "TASKS",
    "WIDTH",
    "Batch",
    "Pair",
    "Task",
    "made",
    "next_word",
    "numbers",
    "seeded",
    "squared",
]

LENGTH = 5
ROWS = 2  # of each microbatch


@dataclass(frozen=True)
class Batch:
    """The arguments of one step: tensors are split by rows, lists are microbatches."""

    args: tuple[Any, ...]
    target: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """`stages(count, dtype)` are freshly made modules, the same every time; so is `batch(step, m, dtype)`."""

    stages: Callable[[int, torch.dtype], list[nn.Module]]
    batch: Callable[[int, int, torch.dtype], Batch]
    loss: Callable[..., Tensor]
    tokens: Callable[[Any], int] | None = None
    bits: str = "always"
    """When gradients are the same to the last bit, given that microbatches go in order: `always`, `fused` when
    no backward is split, `never`."""


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def made(make: Callable[[int, int], nn.Module]) -> Callable[[int, torch.dtype], list[nn.Module]]:
    """Stages by `make(index, count)`, with the same weights on every call."""

    def stages(count: int, dtype: torch.dtype) -> list[nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(count)
            return [make(index, count).to(dtype) for index in range(count)]

    return stages


def _rows(step: int, m: int, dtype: torch.dtype) -> Batch:
    x = numbers(100 + step, ROWS * m, WIDTH, dtype=dtype)
    return Batch((x,), numbers(200 + step, ROWS * m, WIDTH, dtype=dtype))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def _transformer(index: int, count: int, block: Callable[[], nn.Module] = Block) -> nn.Module:
    parts: list[nn.Module] = [Embedding()] if index == 0 else []
    parts.append(block())
    if index == count - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*parts)


def _words(step: int, m: int, _dtype: torch.dtype) -> Batch:
    text = torch.randint(WORDS, (ROWS * m, LENGTH + 1), generator=seeded(300 + step))
    return Batch((text[:, :-1],), text[:, 1:])


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


_PADDING = -100


def _padded(step: int, m: int, dtype: torch.dtype) -> Batch:
    """Words of which a different number in each row counts."""
    batch = _words(step, m, dtype)
    target = batch.target.clone()
    lengths = torch.randint(1, LENGTH + 1, (len(target), 1), generator=seeded(400 + step))
    target[torch.arange(LENGTH) >= lengths] = _PADDING
    return Batch(batch.args, target)


def counted(target: Tensor) -> int:
    return int((target != _PADDING).sum())


def _lengths(step: int, m: int, _dtype: torch.dtype) -> Batch:
    """Ready lists: every microbatch has its own number of rows and words."""
    generator = seeded(500 + step)
    texts = []
    for _ in range(m):
        rows, length = (int(torch.randint(1, top, (), generator=generator)) for top in (4, 9))
        texts.append(torch.randint(WORDS, (rows, length + 1), generator=generator))
    return Batch(([text[:, :-1] for text in texts],), [text[:, 1:] for text in texts])


def _dropping(step: int, m: int, dtype: torch.dtype) -> Batch:
    rows = _rows(step, m, dtype)
    return Batch(rows.args, rows.target, {"seed": [100 * step + microbatch for microbatch in range(m)]})


def _normed(_index: int, _count: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def squared_hidden(output: dict[str, Any], target: Tensor) -> Tensor:
    return functional.mse_loss(output["hidden"], target)


# --- by name ---------------------------------------------------------------------------------------


def _mlp(_index: int, _count: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _frozen(which: Callable[[int, int], bool]) -> Callable[[int, int], nn.Module]:
    def make(index: int, count: int) -> nn.Module:
        return _mlp(index, count).requires_grad_(not which(index, count))

    return make


def _uneven(step: int, m: int, dtype: torch.dtype) -> Batch:
    """One row too few for microbatches of equal size, and another number of rows in every step."""
    rows = ROWS * m - 1 + step
    return Batch((numbers(step, rows, WIDTH, dtype=dtype),), numbers(9 + step, rows, WIDTH, dtype=dtype))


TASKS: dict[str, Task] = {
    "transformer": Task(made(_transformer), _words, next_word),
    "padded": Task(made(_transformer), _padded, next_word, counted),
    "lengths": Task(made(_transformer), _lengths, next_word),
    "checkpointed": Task(
        made(lambda index, count: _transformer(index, count, lambda: Checkpointed(Block()))), _words, next_word
    ),
    "mlp": Task(made(_mlp), _rows, squared),
    "uneven": Task(made(_mlp), _uneven, squared),
    "dropout": Task(made(lambda index, _: Dropping(index)), _dropping, squared),
    "batch-norm": Task(made(_normed), _rows, squared),
    "tied": Task(made(lambda *_: Tied()), _rows, squared, bits="fused"),
    "tied thrice": Task(made(lambda *_: Tied(2)), _rows, squared, bits="fused"),
    "repeated": Task(made(lambda *_: Repeated()), _rows, squared),
    "nested": Task(made(Nested), _rows, squared_hidden),
    "frozen first": Task(made(_frozen(lambda index, _: index == 0)), _rows, squared),
    "frozen middle": Task(made(_frozen(lambda index, count: index == count // 2)), _rows, squared),
    "frozen last": Task(made(_frozen(lambda index, count: index == count - 1)), _rows, squared),
    "frozen but one": Task(made(_frozen(lambda index, count: index != count // 2)), _rows, squared),
}
MODELS = tuple(TASKS)
"""The tasks of this module; other modules add more to `TASKS`."""
