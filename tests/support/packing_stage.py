"""A stage whose output is packed by a function, and unpacked by one of the next stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import WIDTH

__all__ = ["Pack", "PackingStage", "Unpack"]

Pack = Callable[["PackingStage", Tensor, Tensor, int], Any]
Unpack = Callable[..., Tensor]


class PackingStage(nn.Module):
    """A layer that passes on its output packed by `pack`, for `unpack` of the next stage.

    `k` is another number for every microbatch and step: 100 times the step and the microbatch.
    """

    def __init__(self, index: int, count: int, pack: Pack, unpack: Unpack) -> None:
        super().__init__()
        self.index, self.last = index, index == count - 1
        self.pack, self.unpack = pack, unpack
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = []

    def forward(self, *given: Any, k: int) -> Any:
        x = given[0] if self.index == 0 else self.unpack(*given, k=k)
        hidden = torch.tanh(self.layer(x))
        return hidden if self.last else self.pack(self, x, hidden, k)
