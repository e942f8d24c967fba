"""The training that the ranks of the demo run: one model, with a schedule that may change from step to step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.runtime.demo.gpt import DEMO_ROWS, LAYERS, Batches, cross_entropy, gpt
from penstock.runtime.models import split
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.training_log import TrainingLog
from penstock.simulation.timeline import Timeline

__all__ = ["Step", "begin", "end", "train"]


@dataclass(frozen=True)
class Step:
    """The measurements of one step."""

    loss: float
    tokens: int
    seconds: float
    live: int
    """The peak number of live activations on this rank."""
    timeline: Timeline
    """The same on every rank."""


class _Training:
    """The state of a rank between calls."""

    def __init__(self, ranks: int, log: Path, microbatches: int, rows: int) -> None:
        self.stages = split(gpt(), layout=even_layout(LAYERS, ranks))
        own_stage = self.stages[dist.get_rank()]
        self.optimizer = torch.optim.AdamW(own_stage.parameters(), lr=1e-3)
        self.batches = Batches(microbatches, rows)
        self.exit_stack = ExitStack()
        self.log = self.exit_stack.enter_context(TrainingLog(jsonl=log, every=0))
        self.pipelines: dict[str, Pipeline] = {}

    def pipeline(self, schedule: Schedule) -> Pipeline:
        if schedule.name not in self.pipelines:
            pipeline = self.exit_stack.enter_context(Pipeline(self.stages, schedule, loss=cross_entropy))
            self.exit_stack.enter_context(pipeline.profile())
            self.pipelines[schedule.name] = pipeline
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


_current: list[_Training] = []


def begin(ranks: int, log: Path, microbatches: int, rows: int = DEMO_ROWS) -> None:
    """Create the model and its optimizer; `rows`: sequences per microbatch."""
    _current[:] = [_Training(ranks, log, microbatches, rows)]


def train(schedule: Schedule) -> Step:
    """Run one step with a schedule; all schedules train the same model."""
    return _current[0].step(schedule)


def end() -> None:
    """Close all pipelines; all ranks call this."""
    _current.pop().exit_stack.close()
