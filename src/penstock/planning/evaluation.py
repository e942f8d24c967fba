"""What all plans share: requests, configurations, options, and the evaluation that finds and ranks options.

An evaluation is over one space: partitions of layers with known costs (`layers`), or layouts of a whole job
(`jobs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from penstock.arguments import number_ranges, printable, whole_number
from penstock.cost.costs import Costs
from penstock.cost.units import Units
from penstock.errors import Message, Parameter, SearchError
from penstock.families import build
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.planning.partition import LayerCounts
from penstock.search import OnProgress, Progress, SearchResult
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline

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

    def broken_rules(self) -> Iterator[Message]:
        """Yield what is wrong with the fields that all requests have."""
        limit, jitter, seed = self.memory_limit, self.jitter, whole_number(self.seed)
        rules = {
            "seed": ("an integer of at least 0", seed is not None and seed >= 0),
            "jitter": ("a share from 0 to 1", jitter is None or 0 <= jitter <= 1),
            "quantile": ("between 0 and 1", 0 < self.quantile < 1),
            "memory_limit": ("a number of bytes above 0", limit is None or limit > 0),
        }
        for name, (rule, is_met) in rules.items():
            if not is_met:
                given = printable(repr(getattr(self, name)))
                yield Message(Parameter(name), f" must be {rule} (given {given})")

    @property
    def objective(self) -> str:
        """What is minimized, optimizer step included."""
        return "makespan"

    def timeline(self, schedule: Schedule, costs: Costs) -> Timeline:
        """Simulate an order, as far as the objective needs."""
        return simulate(schedule, costs, with_period=self.objective == "period")

    def seconds_of(self, timeline: Timeline) -> float:
        """Return the objective, optimizer step included, without jitter."""
        seconds = timeline.length(self.objective)
        return seconds if self.objective == "period" else seconds + timeline.costs.optimizer_step

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of a picture."""

    @property
    def time_name(self) -> str:
        """What the seconds of an option are."""
        return self.objective

    @property
    def units(self) -> Units:
        """The units of times and sizes."""
        return Units()

    @abstractmethod
    def layout(self, counts: Sequence[int]) -> PipelineLayout | None:
        """Return the layout of stages with these numbers of layers; None if the layers are stages."""

    @abstractmethod
    def to_keys(self) -> dict[str, Any]:
        """Return what is planned as values for JSON."""


@dataclass(frozen=True, eq=False)
class Configuration(ABC):
    """Everything of a plan except the order of work."""

    placement: Placement
    counts: LayerCounts
    """Number of layers of each stage, embedding and output layer included."""
    microbatches: int
    """Of a pipeline."""

    @cached_property
    def stages_per_rank(self) -> int | tuple[int, ...]:
        """Number of stages of each rank; a list if they differ."""
        counts = tuple(map(len, self.placement.stages_of_rank))
        return counts if len(set(counts)) > 1 else counts[0]

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """Costs of the stages."""

    def as_run(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the messages and collectives that it is timed with."""
        return schedule


@dataclass(frozen=True, eq=False)
class Option:
    """A configuration with an order of work, its time and its memory."""

    name: str
    """The family of the order, or `searched`."""
    configuration: Configuration
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
    def why_no_option(self) -> str | Message:
        """Return why there is no option, and what to change."""

    @abstractmethod
    def to_keys(self) -> dict[str, Any]:
        """Return what was left out as values for JSON."""

    def seconds_of(self, schedule: Schedule, option: O) -> float:
        """Return the seconds of an order in the configuration of an option, without jitter."""
        configuration = option.configuration
        timeline = self.request.timeline(configuration.as_run(schedule), configuration.costs)
        return self.request.seconds_of(timeline)

    def searched(
        self, configuration: Configuration, *, memory_limit: float | None, seed: int, **more: object
    ) -> SearchResult | None:
        """Search an order for a configuration; return None if none fits. `more` are options of `search`."""
        costs = configuration.costs
        rest = 0.0 if self.request.objective == "period" else costs.optimizer_step

        def on_progress(now: Progress) -> None:
            self.report(f"searching {configuration}", now.fraction, now.best + rest)

        try:
            return self.searcher(
                ranks=configuration.placement.num_ranks,
                microbatches=configuration.microbatches,
                costs=costs,
                placement=configuration.placement,
                stages_per_rank=configuration.stages_per_rank,
                memory_limit=memory_limit,
                seed=seed,
                on_progress=on_progress,
                **more,
            )
        except SearchError:
            return None

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
