"""Small models as lists of stages, their batches and their losses: what the distributed tests train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "TASKS", "WIDTH", "Batch", "Task", "made", "numbers", "seeded", "squared"]

WIDTH = 8
WORDS = 17
LENGTH = 5
ROWS = 2  # of each microbatch


@dataclass(frozen=True)
class Batch:
    """What one step is given: tensors to be split by rows, lists as ready microbatches."""

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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def made(make: Callable[[int, int], nn.Module]) -> Callable[[int, torch.dtype], list[nn.Module]]:
    """Stages by `make(index, count)`, with the same weights whoever asks for them."""

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


# --- a transformer ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Checkpointed(nn.Module):
    """A module that computes its forward again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Embedding(nn.Module):
    """Words and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.words(words) + self.places(torch.arange(words.shape[1]))
        return result


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


# --- dropout, running statistics, shared weights ---------------------------------------------------


class Dropping(nn.Module):
    """A layer with dropout whose mask is decided by the microbatch's seed."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, seed: int) -> Tensor:
        y = torch.tanh(self.layer(x))
        if not self.training:
            return y
        kept = torch.rand(y.shape, generator=seeded(1000 * seed + self.index)) > 0.2
        return y * kept / 0.8


def _dropping(step: int, m: int, dtype: torch.dtype) -> Batch:
    rows = _rows(step, m, dtype)
    return Batch(rows.args, rows.target, {"seed": [100 * step + microbatch for microbatch in range(m)]})


def _normed(_index: int, _count: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Tied(nn.Module):
    """One weight in a layer, which is used `times`, and once more outside of it."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return functional.linear(torch.tanh(self.other(x)), self.layer.weight)


class Repeated(nn.Module):
    """One layer that is used three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(torch.tanh(self.again(torch.tanh(self.layer(x)))))
        return y


# --- values of many kinds between stages -----------------------------------------------------------


@dataclass
class Held:
    hidden: Tensor
    rest: dict[str, Any]


class Pair(NamedTuple):
    hidden: Tensor
    rest: Any


class Nested(nn.Module):
    """Hands on a hidden state, one skipped past the stages, and a number, packed in another way each time."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.index, self.last = index, index == count - 1
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *given: Any) -> Any:
        if self.index == 0:
            hidden, skipped, depth = given[0], given[0].exp(), 0
        else:
            hidden, skipped, depth = _opened(*given)
        assert depth == self.index, "the number came along"
        hidden = torch.tanh(self.layer(hidden)) + skipped / (depth + 1)
        if self.last:
            return {"hidden": hidden, "depth": depth}
        rest = {"skipped": skipped, "depth": depth + 1, "nothing": None}
        return (
            (hidden, rest),
            Held(hidden, rest),
            Pair(hidden, [rest, "text"]),
            {"hidden": hidden, "rest": (rest,)},
            [hidden, (rest, (), {})],
        )[self.index % 5]


def _opened(first: Any, *more: Any) -> tuple[Tensor, Tensor, int]:
    """The three things, however they are packed."""
    if more:
        hidden, rest = first, more[0]
    elif isinstance(first, Held):
        hidden, rest = first.hidden, first.rest
    elif isinstance(first, Pair):
        hidden, (rest, text) = first
        assert text == "text"
    elif isinstance(first, dict):
        hidden, (rest,) = first["hidden"], first["rest"]
    else:
        hidden, (rest, *empty) = first
        assert empty == [(), {}]
    assert rest["nothing"] is None
    return hidden, rest["skipped"], rest["depth"]


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
    """One row too few for all microbatches to be alike, and another number of rows in every step."""
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
"""What stands here; tests may add tasks of their own."""
