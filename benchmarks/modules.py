"""Stages for benchmarks: some sleep, some do almost nothing, some compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Block",
    "Scale",
    "Sleeping",
    "SleepingForTorch",
    "SleepingRule",
    "sleep",
    "stage_seconds",
]

sleep: Callable[[float], None] = time.sleep
"""How stages sleep; replaced where their sleeps are recorded."""


class Sleeping(nn.Module):
    """A layer whose F, I and W each sleep for `duration` seconds and use no CPU."""

    def __init__(self, duration: float) -> None:
        super().__init__()
        self.duration = duration
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _SleepingFunction.apply(x, self.weight, self.duration)  # type: ignore[no-untyped-call, no-any-return]


class _SleepingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, duration: float) -> Tensor:
        sleep(duration)
        ctx.duration = duration
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        sleep(2 * ctx.duration)
        return gradient * weight, (gradient * x).sum(0), None


class SleepingRule:
    """The split backward of `Sleeping`: input gradient and weight gradient separately."""

    weights = ("weight",)

    def forward(self, layer: Sleeping, x: Tensor, *weights: Tensor | None) -> Tensor:
        sleep(layer.duration)
        return x * weights[0]  # type: ignore[operator]

    def input_gradient(self, layer: Sleeping, _x: Tensor, weights: Any, gradient: Tensor) -> Tensor:
        sleep(layer.duration)
        return gradient.mul(weights[0])

    def weight_gradients(
        self, layer: Sleeping, x: Tensor, _weights: Any, gradient: Tensor, _wanted: Any
    ) -> tuple[Tensor]:
        sleep(layer.duration)
        return ((gradient * x).sum(0),)


def stage_seconds(duration: float) -> tuple[float, float]:
    """F and B of a `Sleeping` stage without a pipeline: its sleeps, which end late, and plain autograd."""
    stage, taken = Sleeping(duration), []
    for _ in range(15):
        x = torch.zeros(1, 4, requires_grad=True)
        begin = time.perf_counter()
        output = stage(x)
        middle = time.perf_counter()
        torch.autograd.backward(output, x)
        taken.append((middle - begin, time.perf_counter() - middle))
    forward, backward = zip(*taken)
    return statistics.median(forward), statistics.median(backward)


class SleepingForTorch(nn.Module):
    """`Sleeping` for torch, which partitions the autograd graph: one node for the input, one for the weight."""

    def __init__(self, duration: float) -> None:
        super().__init__()
        self.duration = duration
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.duration)
        x = _SleepInBackward.apply(x, self.duration)  # type: ignore[no-untyped-call]
        weight: Tensor = _SleepInBackward.apply(self.weight, self.duration)  # type: ignore[no-untyped-call]
        return x * weight


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, duration: float) -> Tensor:
        ctx.duration = duration
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.duration)
        return gradient, None


class Scale(nn.Module):
    """A stage with almost no compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        update: Tensor = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + update
