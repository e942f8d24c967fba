"""The cost of split backward: the time of I and W over that of a full backward (B), and memory.

The ways take turns, every other round in reverse order, so that a change in the speed of the machine affects
all of them. A ratio is the median over rounds; its quartiles show the spread.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.support.deferring import deferring
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.modules import Block
from penstock.runtime.backward.deferral import Deferral

__all__ = ["measure_split"]

ROUNDS = {128: 120, 256: 80, 512: 40}
"""By width."""
Ways = dict[str, Callable[[], float]]
"""By name, functions that return the seconds they took; the first is what the others are compared with."""


def measure_split(print_row: Callable[..., None]) -> None:
    """Measure (I + W) / B: Penstock defers weight gradients, torch partitions the autograd graph."""
    torch.set_num_threads(1)
    print("split (one process)\n  the backward of two transformer blocks, 4 x 64 tokens")
    print_row("width", "", "ms", "ratio to B", "quartiles")
    for width, rounds in ROUNDS.items():
        _print_times(print_row, width, _backwards(width), rounds)
    print("  the weight gradient of one layer, accumulated over 4 microbatches of 256 tokens")
    print_row("width", "", "ms", "ratio to separate", "quartiles")
    for width, rounds in ROUNDS.items():
        _print_times(print_row, width, _weight_products(width), rounds)
    print_row("", "penstock", "torch")
    peaks = (_in_a_process(_peak_memory, run) for run in (_run_deferred, _run_partitioned))
    print_row("MiB, 8 microbatches", *peaks)


def _print_times(print_row: Callable[..., None], width: int, ways: Ways, rounds: int) -> None:
    """Print the median time of each way, and the median and the quartiles of its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 5):
        for name in reversed(times) if number % 2 else times:
            times[name].append(ways[name]())
    first = next(iter(times.values()))
    for name, taken in times.items():
        ratios = [each / of for each, of in zip(taken[5:], first[5:])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print_row(width, name, statistics.median(taken[5:]) * 1e3, middle, f"{low:.3f} to {high:.3f}")


def _backwards(width: int) -> Ways:
    torch.manual_seed(0)
    module = nn.Sequential(Block(width), Block(width))
    x, gradient = torch.randn(4, 64, width, requires_grad=True), torch.randn(4, 64, width)
    return {
        "B": partial(_full, module, x, gradient),
        "I + W": partial(_deferred, module, x, gradient, fusion=False),
        "I + W with fusion": partial(_deferred, module, x, gradient, fusion=True),
        "I + W of torch": partial(_partitioned, module, x, gradient),
    }


def _full(module: nn.Module, x: Tensor, gradient: Tensor) -> float:
    output = module(x)
    start = time.perf_counter()
    output.backward(gradient)
    return time.perf_counter() - start


def _deferred(module: nn.Module, x: Tensor, gradient: Tensor, *, fusion: bool) -> float:
    deferral = Deferral(module, fusion=fusion)
    with deferral.installed():
        output = module(x)
        start = time.perf_counter()
        with deferring(deferral) as jobs:
            output.backward(gradient)
        jobs.run()
        return time.perf_counter() - start


def _partitioned(module: nn.Module, x: Tensor, gradient: Tensor) -> float:
    output = module(x)
    start = time.perf_counter()
    _, groups = stage_backward_input([output], [gradient], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    return time.perf_counter() - start


def _weight_products(width: int) -> Ways:
    """One product and one addition per microbatch; the two in one; one product of all microbatches."""
    xs = [torch.randn(256, width) for _ in range(4)]
    gradients = [torch.randn(256, 4 * width) for _ in range(4)]
    total = torch.zeros(4 * width, width)

    def separate() -> None:
        for x, gradient in zip(xs, gradients):
            total.add_(gradient.t() @ x)

    def fused() -> None:
        for x, gradient in zip(xs, gradients):
            total.addmm_(gradient.t(), x)

    def batched() -> None:
        total.add_(torch.cat(gradients).t() @ torch.cat(xs))

    return {
        "separate": partial(_seconds, separate),
        "fused": partial(_seconds, fused),
        "batched": partial(_seconds, batched),
    }


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


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
            with deferring(deferral) as jobs:
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
