"""The modules of the small models that the distributed tests train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = [
    "WIDTH",
    "WORDS",
    "Block",
    "Checkpointed",
    "Dropping",
    "Embedding",
    "Nested",
    "Pair",
    "Repeated",
    "Tied",
    "seeded",
]

WIDTH = 8
WORDS = 17


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

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


@dataclass
class Held:
    hidden: Tensor
    rest: dict[str, Any]


class Pair(NamedTuple):
    hidden: Tensor
    rest: Any


class Nested(nn.Module):
    """Passes on a hidden state, one skipped past the stages, and a number, packed in another way each time."""

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
