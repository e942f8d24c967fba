"""A small GPT over characters, and the page of text it learns."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["LAYERS", "Batches", "cross_entropy", "gpt", "parts"]

WIDTH, HEADS, LAYERS, LENGTH = 256, 4, 8, 64
ROWS = 4
"""Of a microbatch."""


class Embedding(nn.Module):
    """Characters and their places become vectors."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Of each character, the sum of both."""
        found: Tensor = self.characters(ids) + self.places(torch.arange(ids.shape[1]))
        return found


class Block(nn.Module):
    """Attention to what came before, then a layer for each place by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Both are added to what came in."""
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.attention(self.norm(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_after(x))))
        return found


def gpt() -> nn.Sequential:
    """The model; the same numbers in every process."""
    torch.manual_seed(0)
    count = len(_text()[1])
    blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
    return nn.Sequential(Embedding(count), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """How surprising the next character was."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def _text() -> tuple[Tensor, list[str]]:
    """The page as numbers, and the character that each number is."""
    page = files("penstock.runtime.demo").joinpath("text.txt").read_text(encoding="utf-8")
    characters = sorted(set(page))
    return torch.tensor([characters.index(character) for character in page]), characters


class Batches:
    """Pieces of the page from places drawn at random, always the same."""

    def __init__(self, microbatches: int) -> None:
        self._rows = ROWS * microbatches
        self._draw = torch.Generator().manual_seed(1)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The next inputs, and the characters that follow them."""
        page, _ = _text()
        places = torch.randint(len(page) - LENGTH, (self._rows,), generator=self._draw)
        rows = torch.stack([page[place : place + LENGTH + 1] for place in places.tolist()])
        return rows[:, :-1], rows[:, 1:]


def parts() -> tuple[nn.Module, object, Tensor, Tensor]:
    """Model, loss and a batch for as many ranks as there are, to be verified."""
    return gpt(), cross_entropy, *Batches(2 * dist.get_world_size())()
