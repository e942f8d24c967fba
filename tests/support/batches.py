"""Batches to split, and a splitter for strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch import Batcher


def rows(count: int, *more: int) -> Tensor:
    return torch.arange(float(torch.Size((count, *more)).numel())).reshape(count, *more)


def only_argument(batcher: Batcher, value: object) -> list[Any]:
    """The parts of a value that is the only argument."""
    args, kwargs = batcher.split_arguments((value,), {})
    assert kwargs == [{} for _ in args]
    return [value for (value,) in args]


class Words:
    """Splits a string into words."""

    def split(self, value: Any, count: int) -> Sequence[Any]:
        return str(value).split(" ")[:count]

    def merge(self, parts: Sequence[Any]) -> str:
        return " ".join(map(str, parts))
