"""What all plans share: the base of requests, of options, and of the evaluation that finds and ranks options.

An evaluation is over one space: partitions of layers with known costs (`layer_evaluation`), or layouts of a
whole job (`job_evaluation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from penstock.arguments import number_ranges, printable, whole_number
from penstock.cost.costs import Costs
from penstock.cost.units import Units
from penstock.errors import Message, Parameter
from penstock.families import build
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.planning.partition import LayerCounts
from penstock.search import OnProgress, Progress, SearchResult

Searcher: TypeAlias = Callable[..., SearchResult]
"""A function with the arguments of `penstock.search.search`."""

POLICY_KINDS = {"recompute": Kind.RECOMPUTE, "offload": Kind.OFFLOAD}
"""The parts of a memory policy, each with the kind of its actions."""


@dataclass(frozen=True, kw_only=True)
class Request(ABC):
    """What to plan, and how options are ranked."""

    memory_limit: float | None = None
    """Bytes per rank."""
    recompute: bool = False
    """Whether the memory policy may recompute stages."""
    offload: bool = False
    """Whether the memory policy may keep activations on the host."""
    jitter: float | None = None
    """Share by which the duration of actions varies; options are then ranked by a quantile of their time."""
    quantile: float = 0.95
    seed: int = 0

    def common_problems(self) -> Iterator[Message]:
        """Yield what is wrong with the fields that all requests have."""
        if (seed := whole_number(self.seed)) is None or seed < 0:
            given = printable(repr(self.seed))
            yield Message(Parameter("seed"), f" must be an integer of at least 0 (given {given})")
        if self.jitter is not None and not 0 <= self.jitter <= 1:
            yield Message(Parameter("jitter"), f" must be a share from 0 to 1 (given {self.jitter})")
        if not 0 < self.quantile < 1:
            yield Message(Parameter("quantile"), f" must be between 0 and 1 (given {self.quantile})")

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of a picture."""

    @property
    @abstractmethod
    def time_name(self) -> str:
        """What the seconds of an option are."""

    @property
    @abstractmethod
    def units(self) -> Units:
        """The units of times and sizes."""

    @abstractmethod
    def layout(self, counts: Sequence[int]) -> PipelineLayout | None:
        """Return the layout of stages with these numbers of layers; None if the layers are stages."""

    @abstractmethod
    def to_keys(self) -> dict[str, Any]:
        """Return what is planned as values for JSON."""


class StagesOfRanks(Protocol):
    """What every configuration has: stages of layers on ranks, microbatches, and their costs."""

    @property
    def placement(self) -> Placement:
        """Stages on ranks."""

    @property
    def counts(self) -> LayerCounts:
        """Number of layers of each stage, embedding and output layer included."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a pipeline."""

    @property
    def stages_per_rank(self) -> int | tuple[int, ...]:
        """Number of stages of each rank; a list if they differ."""

    @property
    def costs(self) -> Costs:
        """Costs of the stages."""


@dataclass(frozen=True, eq=False)
class Option:
    """A configuration with an order of work, its time and its memory."""

    name: str
    """The family of the order, or `searched`."""
    configuration: StagesOfRanks
    order: Schedule | None
    """The order of work, compute only; None for the order of the family, which is built when it is used."""
    memory: float
    """Bytes on the rank with the highest peak."""
    seconds: float
    """The time that options are ranked by: a quantile under jitter if there is jitter."""
    seconds_without_jitter: float
    makespan: float
    bubble: float
    """The mean share of the objective in which a rank idles."""

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work, compute only."""
        configuration = self.configuration
        return self.order or build(
            self.name,
            ranks=configuration.placement.num_ranks,
            microbatches=configuration.microbatches,
            stages_per_rank=configuration.stages_per_rank,
        )

    @cached_property
    def memory_policy(self) -> str:
        """What is recomputed and offloaded, in words; empty if nothing is."""
        return "" if self.order is None else memory_policy_of(self.order)

    @property
    def policy_class(self) -> str:
        """`none`, `recompute`, `offload` or `both`."""
        used = [name for name, kind in POLICY_KINDS.items() if self.order and self.order.table.has(kind)]
        return "both" if len(used) > 1 else used[0] if used else "none"

    @property
    def full_name(self) -> str:
        """The name with the memory policy, if there is one."""
        return f"{self.name}, {self.memory_policy}" if self.memory_policy else self.name

    @property
    def sort_key(self) -> tuple[float, float, str, int]:
        """Fastest first; among equals the one with the least memory."""
        return self.seconds, self.memory, self.name, self.configuration.microbatches

    def to_keys(self) -> dict[str, Any]:
        """Return the option as values for JSON."""
        configuration = self.configuration
        return {
            "schedule": self.name,
            "memory_policy": self.memory_policy,
            "stages_per_rank": configuration.stages_per_rank,
            "stage_to_rank": list(configuration.placement.stage_to_rank),
            "layers_per_stage": list(configuration.counts),
            "microbatches": configuration.microbatches,
            "seconds": self.seconds,
            "seconds_without_jitter": self.seconds_without_jitter,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "peak_memory": self.memory,
        }


R = TypeVar("R", bound=Request)
O = TypeVar("O", bound=Option)


def memory_policy_of(schedule: Schedule) -> str:
    """Return for example `recompute stages 0-2`, or `offload 13 of 64` activations."""
    texts = []
    for name, kind in POLICY_KINDS.items():
        if not schedule.table.has(kind):
            continue
        counts, stages = schedule.table.count_by_stage(kind), schedule.num_stages
        used = np.flatnonzero(counts).tolist()
        if not set(counts.tolist()) <= {0, schedule.microbatches}:
            texts.append(f"{name} {counts.sum()} of {stages * schedule.microbatches}")
        elif len(used) == stages:
            texts.append(f"{name} all stages")
        else:
            texts.append(f"{name} stage{'s' * (len(used) > 1)} {number_ranges(used, ',', most=stages)}")
    return " and ".join(texts)


def by_rank(options: Iterable[O]) -> list[O]:
    """Return the options, fastest first."""
    return sorted(options, key=lambda each: each.sort_key)


def frontier(options: Iterable[O]) -> list[O]:
    """Return the Pareto frontier of time and memory, fastest first."""
    found: list[O] = []
    for option in by_rank(options):
        if not found or option.memory < found[-1].memory:
            found.append(option)
    return found


class Evaluation(ABC, Generic[R, O]):
    """The options of a request that were found so far; it can be interrupted at any time."""

    def __init__(self, request: R, on_progress: OnProgress | None, searcher: Searcher) -> None:
        self.request, self.searcher = request, searcher
        self.on_progress = on_progress or (lambda _: None)
        self._started = perf_counter()
        self.options: list[O] = []
        self.has_quantiles = False
        """Whether the options are ranked by a quantile under jitter."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """Lower bound for every option, in seconds."""

    @abstractmethod
    def evaluate_families(self) -> None:
        """Evaluate the families in every configuration that can matter."""

    @abstractmethod
    def evaluate_memory_policies(self) -> None:
        """Evaluate orders that recompute or offload, if the request allows that."""

    @abstractmethod
    def search_orders(self) -> None:
        """Search orders for the best configurations."""

    @abstractmethod
    def options_for_jitter(self) -> tuple[list[O], list[O]]:
        """Return the options that get a quantile, and those that get one only if they could win."""

    @abstractmethod
    def quantile(self, option: O) -> float:
        """Return the quantile of an option's seconds under jitter."""

    @abstractmethod
    def seconds_of(self, schedule: Schedule, option: O) -> float:
        """Return the seconds of an order in the configuration of an option, without jitter."""

    @abstractmethod
    def why_no_option(self) -> str | Message:
        """Return why there is no option, and what to change."""

    @abstractmethod
    def to_keys(self) -> dict[str, Any]:
        """Return what was left out as values for JSON."""

    def offered(self) -> Iterable[O]:
        """Return the options that a plan offers."""
        return self.options

    def set_aside(self, options: Sequence[O]) -> None:
        """Record options that cannot win under jitter."""

    def rank_by_quantile(self) -> None:
        """Simulate jitter; only options with a quantile are kept, because only these can be compared."""
        if self.request.jitter is None:
            return
        always, others = self.options_for_jitter()
        options, ranked = [*always, *others], list[O]()
        try:
            for done, option in enumerate(options):
                if done >= len(always) and option.seconds > min(each.seconds for each in ranked):
                    self.set_aside(options[done:])
                    break
                self.report(f"simulating jitter of {option}", done / len(options))
                ranked.append(replace(option, seconds=self.quantile(option)))
        finally:  # also after Ctrl-C
            self.options, self.has_quantiles = ranked or self.options, bool(ranked)

    def report(self, phase: str, fraction: float = 0.0, best: float = inf) -> None:
        """Report the phase, the fraction of it that is done, and the best so far."""
        best = min([best, *(option.seconds for option in self.options)])
        self.on_progress(Progress(phase, best, self.bound, perf_counter() - self._started, fraction))
