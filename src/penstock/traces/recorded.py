"""What a trace says about one rank: its actions in order, with times of the rank's own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ir.action import Step

__all__ = ["RankTrace", "Recorded"]


class Recorded(NamedTuple):
    """One action with its times in nanoseconds."""

    step: Step
    start: int
    end: int
    exact: bool = True
    """Whether `start` is that of its own work; if not, it may have waited for a message first."""


@dataclass
class RankTrace:
    """The actions of one rank in the order of its list."""

    source: str
    """The name of the file."""
    rank: int | None
    """The rank in the job, if the file says so."""
    host: str
    """The machine: ranks of one machine have one clock. Empty if unknown."""
    pipeline: tuple[int, ...] = ()
    """The ranks of its pipeline, if the file names its process groups."""
    recorded: list[Recorded] = field(default_factory=list)
    single_stage: bool = False
    """Whether its actions name no stage: then each rank has one, in the order of the ranks."""
    numbered_through: bool = False
    """Whether microbatches are numbered through all steps, because nothing tells where a step begins."""
    timeline: str = ""
    """The name of the timeline, in a file with several."""
