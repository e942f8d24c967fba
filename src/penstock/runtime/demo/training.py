"""The training of the demonstration, as its ranks do it: one model, and schedules that change."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.runtime.demo.gpt import LAYERS, Batches, cross_entropy, gpt
from penstock.runtime.models import split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.training_log import TrainingLog
from penstock.simulation.timeline import Timeline

__all__ = ["Step", "begin", "end", "train"]


@dataclass(frozen=True)
class Step:
    """What one step came to."""

    loss: float
    tokens: int
    seconds: float
    live: int
    """The most activations that this rank held at once."""
    timeline: Timeline
    """The same on every rank."""


class _Training:
    """What a rank keeps between calls."""

    def __init__(self, ranks: int, log: Path) -> None:
        self.stages = split(gpt(), layout=even_layout(LAYERS, ranks))
        own = self.stages[dist.get_rank()]
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
        self.batches = Batches(2 * ranks)
        self.opened = ExitStack()
        self.log = self.opened.enter_context(TrainingLog(jsonl=log, every=0))
        self.pipelines: dict[str, Pipeline] = {}

    def pipeline(self, schedule: Schedule) -> Pipeline:
        if schedule.name not in self.pipelines:
            made = self.opened.enter_context(Pipeline(self.stages, schedule, loss=cross_entropy))
            self.opened.enter_context(made.profile())
            self.pipelines[schedule.name] = made
        return self.pipelines[schedule.name]

    def step(self, schedule: Schedule) -> Step:
        pipeline = self.pipeline(schedule)
        ids, target = self.batches()
        dist.barrier()
        begin = time.perf_counter()
        result = pipeline.step(ids, target=target)
        norm = pipeline.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        assert result.loss is not None
        assert result.timeline is not None
        self.log.step(result.loss, norm, tokens=target.numel())
        return Step(result.loss, target.numel(), seconds, pipeline.peak_live_activations, result.timeline)


_now: list[_Training] = []


def begin(ranks: int, log: Path) -> None:
    """Make the model and what trains it."""
    _now[:] = [_Training(ranks, log)]


def train(schedule: Schedule) -> Step:
    """One step with a schedule; the model is the same for all of them."""
    return _now[0].step(schedule)


def end() -> None:
    """Hang up, all ranks together."""
    _now.pop().opened.close()
