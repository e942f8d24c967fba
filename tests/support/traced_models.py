"""Models whose values skip modules, traced and trained as the stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn.functional import mse_loss

from penstock import Schedule
from penstock.runtime import Pipeline, split
from tests.support.reference import TIMEOUT

__all__ = ["UNet", "Wired", "batch", "traced", "train_and_compare", "train_unet"]

ROWS, WIDTH = 12, 4


class Block(nn.Module):
    """A residual block, which tracers look into."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x))) + x
        return result


class UNet(nn.Module):
    """Skips over one and over three blocks, an input and a buffer used late, a weight used early and late."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first, *middle, last = self.blocks
        outer = inner = first(x) * self.scale + self.shift
        for block in middle:
            inner, before = block(inner), inner
            inner = inner + before
        return last(inner + outer) * self.scale + self.shift * mask, self.norm(inner)


class Wired(nn.Module):
    """Each layer takes the sum of random earlier values, and the result is the sum of all unused ones."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        count = rng.randint(3, 7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.wires = [rng.sample(range(k + 1), rng.randint(1, min(3, k + 1))) for k in range(count)]
        used = {wire for wires in self.wires for wire in wires}
        self.results = [value for value in range(1, count + 1) if value not in used]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, wires in zip(self.layers, self.wires):
            values.append(torch.sin(layer(torch.stack([values[wire] for wire in wires]).sum(0))))
        return torch.stack([values[result] for result in self.results]).sum(0)


def traced(model: nn.Module, how: str, *inputs: Any) -> GraphModule:
    """By `fx`, which keeps the modules, or by `export`, which keeps operations and weights."""
    if how == "fx":
        return symbolic_trace(model)
    exported: GraphModule = torch.export.export(model, inputs, strict=False).module()
    return exported


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, (torch.rand(ROWS, 1, dtype=torch.float64, generator=generator) > 0.3).double(), y


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target) + 0.1 * output[1].square().mean()


def train_unet(schedule: Schedule | str, how: str, microbatches: int = 4) -> list[str]:
    """On this rank: names of the gradients that differ from one process with the same microbatches."""
    torch.manual_seed(0)
    whole = UNet().double()
    for model in (whole, cut := UNet().double()):
        model.load_state_dict(whole.state_dict())
    x, mask, y = batch()
    parts = [torch.chunk(each, microbatches) for each in (x, mask, y)]
    for a, b, c in zip(*parts):
        (loss(whole(a, b), c) / microbatches).backward()  # type: ignore[no-untyped-call]
    stages = split(traced(cut, how, parts[0][0], parts[1][0]), at=["blocks.1", "blocks.2", "blocks.3"])
    if isinstance(schedule, Schedule):
        schedule = schedule.over(stages[0].stage_graph)  # type: ignore[arg-type]
    return train_and_compare(stages, schedule, whole, microbatches, (x, mask), y, loss)


def train_and_compare(
    stages: dict[int, nn.Module],
    schedule: Schedule | str,
    whole: nn.Module,
    microbatches: int,
    inputs: Sequence[Tensor],
    target: Tensor,
    loss_function: object,
) -> list[str]:
    """Train one step, and compare gradients and buffers with those of the whole model, by name."""
    problems = []
    pipeline = Pipeline(stages, schedule, microbatches=microbatches, loss=loss_function, timeout=TIMEOUT)  # type: ignore[arg-type]
    with closing(pipeline):
        pipeline.step(*inputs, target=target)
        for number, stage in pipeline.modules.items():
            for name, parameter in stage.named_parameters():
                expected, found = whole.get_parameter(name).grad, parameter.grad
                alike = expected is found is None
                if expected is not None and found is not None:
                    alike = torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
                if not alike:
                    problems.append(f"stage {number}: {name}")
            problems += [
                f"stage {number}: {name}"
                for name, buffer in stage.named_buffers()
                if not torch.equal(buffer, whole.get_buffer(name))
            ]
    return problems
