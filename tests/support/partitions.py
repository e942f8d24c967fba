"""Models to be split into stages."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def model() -> nn.Sequential:
    layers = nn.Sequential(linear(), nn.Sequential(linear(), nn.BatchNorm1d(2)), linear(), linear())
    return nn.Sequential(OrderedDict(embed=linear(), layers=layers, head=linear()))


class Block(nn.Module):
    """No Sequential, though it holds two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.rest = nn.Sequential(linear(), linear())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(self.first(x)) + x
        return out
