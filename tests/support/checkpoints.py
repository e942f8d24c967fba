"""A small model for checkpoints, what is the same, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CheckpointError
from penstock.runtime import load_checkpoint


def small(width: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    return nn.Sequential(
        OrderedDict(first=nn.Linear(2, width), norm=nn.BatchNorm1d(width), last=nn.Linear(width, 2))
    ).to(dtype)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def error_of(path: Path, *given: Any) -> list[str]:
    with pytest.raises(CheckpointError, match=r"cannot be loaded:\n") as caught:
        load_checkpoint(path, *given)
    return list(caught.value.problems)
