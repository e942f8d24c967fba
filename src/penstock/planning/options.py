"""Evaluated options with their time and memory, rejected ones, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.arguments import number_ranges
from penstock.bounds import Bound
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Configuration
from penstock.simulation.timeline import Timeline

# Techniques in words: which stages of a schedule are recomputed and offloaded.


TECHNIQUES = {"recompute": Kind.RECOMPUTE, "offload": Kind.OFFLOAD}


def class_of(schedule: Schedule) -> str:
    """`none`, `recompute`, `offload` or `both`."""
    used = [name for name, kind in TECHNIQUES.items() if schedule.table.has(kind)]
    return "both" if len(used) > 1 else used[0] if used else "none"


def technique_of(schedule: Schedule) -> str:
    """For example `recompute stages 0-2`, or `offload 13 of 64`, activations of a stage and microbatch."""
    texts = []
    for name, kind in TECHNIQUES.items():
        if not schedule.table.has(kind):
            continue
        counts = schedule.table.count_by_stage(kind)
        if set(counts.tolist()) <= {0, schedule.microbatches}:
            texts.append(f"{name} {_stages_text(np.flatnonzero(counts).tolist(), schedule.num_stages)}")
        else:
            texts.append(f"{name} {counts.sum()} of {schedule.num_stages * schedule.microbatches}")
    return " and ".join(texts)


def _stages_text(stages: Sequence[int], num_stages: int) -> str:
    if len(stages) == num_stages:
        return "all stages"
    ranges = number_ranges(stages, ",", most=num_stages)
    return f"stage{'s' * (len(stages) > 1)} {ranges}"


@dataclass(frozen=True, eq=False)
class Option:
    """A configuration with an order of work, simulated."""

    name: str
    """The family, or `searched`."""
    configuration: Configuration
    schedule: Schedule
    """The order of work: compute only, also where the timeline has messages."""
    timeline: Timeline
    seconds: float
    """The objective that options are ranked by, optimizer step included, or its quantile under jitter."""
    bound: Bound
    """Lower bound for any order in this configuration, without jitter."""
    seconds_without_jitter: float
    found_by: str = ""

    @cached_property
    def memory(self) -> float:
        """The peak memory in bytes, of the rank with the highest."""
        return max(self.timeline.peak_memory)

    @cached_property
    def technique(self) -> str:
        """What is recomputed and offloaded, in words; empty without techniques."""
        return technique_of(self.schedule)

    @property
    def gap(self) -> float:
        """The excess over the bound, as a share of the bound."""
        return self.bound.gap(self.seconds_without_jitter)

    @property
    def samples_per_second(self) -> float:
        """Of this pipeline."""
        return (
            self.configuration.samples * self.configuration.microbatches / self.seconds if self.seconds else 0.0
        )

    @property
    def sort_key(self) -> tuple[float, float, str, int]:
        """Fastest first; among equals the one with the least memory."""
        return self.seconds, self.memory, self.name, self.configuration.microbatches

    def __str__(self) -> str:
        with_technique = f"{self.name}, {self.technique}" if self.technique else self.name
        return f"{with_technique} ({self.configuration})"


@dataclass(frozen=True)
class Rejected:
    """An order that was not simulated, with its peak memory and its lower bound in this configuration."""

    name: str
    configuration: Configuration
    memory: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name} ({self.configuration})"


class Ranked(Protocol):
    """What has a time, which its key begins with, and a memory."""

    @property
    def memory(self) -> float:
        """Bytes."""

    @property
    def sort_key(self) -> Any:  # noqa: ANN401 -- a tuple
        """Fastest first."""


R = TypeVar("R", bound=Ranked)


def frontier(options: Iterable[R]) -> list[R]:
    """The Pareto frontier of time and memory, fastest first."""
    found: list[R] = []
    for option in sorted(options, key=lambda each: each.sort_key):
        if not found or option.memory < found[-1].memory:
            found.append(option)
    return found
