"""Stages for benchmarks: some sleep, some do almost nothing, some compute."""

from __future__ import annotations

import os
import statistics
import time
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Block",
    "Scale",
    "Sleeping",
    "SleepingForTorch",
    "SleepingRule",
    "Takes",
    "stage_seconds",
]

_POLLED_SECONDS = 0.0005
"""The end of a sleep is polled: sleeps end up to 0.2 ms late, and what follows them is slow for a while."""


class Takes:
    """A block that takes `duration` seconds: it sleeps, then does its work, then polls the clock.

    Like a stage that computes, it ends on time, with its core awake and torch's code in the caches.
    """

    total = 0.0
    """Seconds of all blocks of this process."""

    def __init__(self, duration: float) -> None:
        self._duration = duration

    def __enter__(self) -> None:
        self._end = time.perf_counter() + self._duration
        time.sleep(max(0.0, self._duration - _POLLED_SECONDS))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Takes.total += self._duration
        while time.perf_counter() < self._end:
            os.sched_yield()


class Sleeping(nn.Module):
    """A layer whose F, I and W each take `duration` seconds and use almost no CPU."""

    def __init__(self, duration: float) -> None:
        super().__init__()
        self.duration = duration
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _SleepingFunction.apply(x, self.weight, self.duration)  # type: ignore[no-untyped-call, no-any-return]


class _SleepingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, duration: float) -> Tensor:
        with Takes(duration):
            ctx.duration = duration
            ctx.save_for_backward(x, weight)
            return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        with Takes(2 * ctx.duration):
            x, weight = ctx.saved_tensors
            return gradient * weight, (gradient * x).sum(0), None


class SleepingRule:
    """The split backward of `Sleeping`: input gradient and weight gradient separately."""

    weights = ("weight",)

    def forward(self, layer: Sleeping, x: Tensor, *weights: Tensor | None) -> Tensor:
        with Takes(layer.duration):
            return x * weights[0]  # type: ignore[operator]

    def input_gradient(self, layer: Sleeping, _x: Tensor, weights: Any, gradient: Tensor) -> Tensor:
        with Takes(layer.duration):
            return gradient.mul(weights[0])

    def weight_gradients(
        self, layer: Sleeping, x: Tensor, _weights: Any, gradient: Tensor, _wanted: Any
    ) -> tuple[Tensor]:
        with Takes(layer.duration):
            return ((gradient * x).sum(0),)


def stage_seconds(duration: float) -> tuple[float, float]:
    """F and B of a `Sleeping` stage without a pipeline, with plain autograd."""
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
        with Takes(self.duration):
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
        with Takes(ctx.duration):
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
