"""Stages for benchmarks: some sleep, some do almost nothing, some compute; and the cost of split backward."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.runtime.backward.deferral import Deferral

__all__ = ["Block", "Scale", "Sleeping", "SleepingForTorch", "SleepingRule", "measure_split"]


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
        time.sleep(duration)
        ctx.duration = duration
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.duration)
        return gradient * weight, (gradient * x).sum(0), None


class SleepingRule:
    """The split backward of `Sleeping`: input gradient and weight gradient separately."""

    weights = ("weight",)

    def forward(self, layer: Sleeping, x: Tensor, *weights: Tensor | None) -> Tensor:
        time.sleep(layer.duration)
        return x * weights[0]  # type: ignore[operator]

    def input_gradient(self, layer: Sleeping, _x: Tensor, weights: Any, gradient: Tensor) -> Tensor:
        time.sleep(layer.duration)
        return gradient.mul(weights[0])

    def weight_gradients(
        self, layer: Sleeping, x: Tensor, _weights: Any, gradient: Tensor, _wanted: Any
    ) -> tuple[Tensor]:
        time.sleep(layer.duration)
        return ((gradient * x).sum(0),)


class SleepingForTorch(nn.Module):
    """`Sleeping` for torch, which partitions the autograd graph: one node for the input, one for the weight."""

    def __init__(self, duration: float) -> None:
        super().__init__()
        self.duration = duration
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.duration)
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
        time.sleep(ctx.duration)
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


def measure_split(print_row: Callable[..., None]) -> None:
    """Measure (I + W) / B: Penstock defers weight gradients, torch partitions the autograd graph."""
    torch.set_num_threads(1)
    print("split (one process)\n  (I + W) / B of two transformer blocks, 4 x 64 tokens")
    print_row("width", "penstock", "torch")
    for width in (128, 256, 512):
        torch.manual_seed(0)
        module = nn.Sequential(Block(width), Block(width))
        x = torch.randn(4, 64, width, requires_grad=True)
        gradient = torch.randn(4, 64, width)
        backwards = (_full, _deferred, _partitioned)
        times = [[backward(module, x, gradient) for backward in backwards] for _ in range(25)][5:]
        full, deferred, partitioned = (statistics.median(column) for column in zip(*times))
        print_row(width, deferred / full, partitioned / full)
    peaks = (_in_a_process(_peak_memory, run) for run in (_run_deferred, _run_partitioned))
    print_row("MiB, 8 microbatches", *peaks)


def _in_a_process(measure: Callable[..., float], *args: Any) -> float:
    """Measure in a new process, because the peak memory is that of the whole process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, args)


def _peak_memory(run: Callable[..., None]) -> float:
    """MiB that F, I and then W of 8 microbatches need at width 512, beyond the peak of one microbatch."""
    torch.set_num_threads(1)
    module = nn.Sequential(Block(512), Block(512))
    peaks = []
    for count in (1, 8):
        run(
            module, [torch.randn(4, 64, 512, requires_grad=True) for _ in range(count)], torch.randn(4, 64, 512)
        )
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peaks[1] - peaks[0]


def _run_deferred(module: nn.Module, inputs: list[Tensor], gradient: Tensor) -> None:
    deferral = Deferral(module)
    deferred = []
    with deferral.installed():
        outputs = [module(x) for x in inputs]
        inputs.clear()
        while outputs:
            with deferral.deferring() as jobs:
                torch.autograd.backward(outputs.pop(0), gradient)
            deferred.append(jobs)
        for jobs in deferred:
            jobs.run()


def _run_partitioned(module: nn.Module, inputs: list[Tensor], gradient: Tensor) -> None:
    outputs = [module(x) for x in inputs]
    groups = []
    while outputs:
        parts = stage_backward_input([outputs.pop(0)], [gradient], [inputs.pop(0)], module.parameters())
        groups.append(parts[1])
    while groups:
        stage_backward_weight(module.parameters(), groups.pop(0))


def _full(module: nn.Module, x: Tensor, gradient: Tensor) -> float:
    output = module(x)
    start = time.perf_counter()
    output.backward(gradient)
    return time.perf_counter() - start


def _deferred(module: nn.Module, x: Tensor, gradient: Tensor) -> float:
    deferral = Deferral(module)
    with deferral.installed():
        output = module(x)
        start = time.perf_counter()
        with deferral.deferring() as jobs:
            output.backward(gradient)
        jobs.run()
        return time.perf_counter() - start


def _partitioned(module: nn.Module, x: Tensor, gradient: Tensor) -> float:
    output = module(x)
    start = time.perf_counter()
    _, groups = stage_backward_input([output], [gradient], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    return time.perf_counter() - start
