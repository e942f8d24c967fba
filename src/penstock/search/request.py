"""A request for a search, with all errors of its arguments at once; its budget, its progress and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, cast

from penstock.arguments import plural, printable, some, whole_number
from penstock.bounds import OBJECTIVES, Bound, gap_of
from penstock.cost.costs import Costs
from penstock.cost.memory import activation_bytes, activation_limits, counting_activations, fixed_bytes
from penstock.display import Displayed
from penstock.errors import Message, Parameter, PenstockError, SearchError
from penstock.families.depth_order import topological_placement
from penstock.families.registry import MAX_WORK, graph_and_stages
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement, StagesPerRank, problems_of_counts
from penstock.ir.schedule import Schedule
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.timeline import Timeline

_PLACEMENTS = ("any", "loop", "v")
_MAX_NUMBER = 1e18  # seconds or bytes
_MAX_SEARCHED = 1 << 20
"""Stages times microbatches; a single order of a larger problem takes longer than most time limits."""


@dataclass(frozen=True)
class SearchRequest:
    """What to search for, and how long; the fields are the arguments of `search`."""

    ranks: int
    microbatches: int
    costs: Costs | None
    stages_per_rank: StagesPerRank
    placement: Placement | str
    memory_limit: float | None
    live_limit: int | None
    objective: str
    seconds: float
    moves: int | None
    seed: int
    jitter: float | None
    quantile: float
    graph: StageGraph | None = None

    def check(self) -> None:
        """Raise `SearchError` with every error of the arguments."""
        errors = [*self._errors_in_counts(), *self._errors_in_limits(), *self._errors_in_choices()]
        if self.jitter is not None:
            errors += self._errors_in_jitter(self.jitter)
        if errors:
            raise SearchError(Message.join("; ", errors))

    def _errors_in_counts(self) -> Iterator[str | Message]:
        minima = {"ranks": 1, "microbatches": 1, "live_limit": 1, "moves": 0, "seed": 0}
        if isinstance(self.stages_per_rank, Sequence):
            yield from problems_of_counts(self.ranks, self.stages_per_rank)
        else:
            minima["stages_per_rank"] = 1
        for name, least in minima.items():
            value = getattr(self, name)
            if value is None and name in ("live_limit", "moves"):
                continue
            if (number := whole_number(value)) is None or number < least:
                yield _must_be(name, f"an integer of at least {least}", value)

    def _errors_in_limits(self) -> Iterator[Message]:
        if not _is_within(_MAX_NUMBER, self.seconds):
            yield _must_be("seconds", f"from 0 to {_MAX_NUMBER:g}", self.seconds)
        if self.memory_limit is not None and self.live_limit is not None:
            limits = Parameter("memory_limit"), ", in bytes, or ", Parameter("live_limit"), ", in activations"
            yield Message("give ", *limits, ", not both")
        if self.memory_limit is not None and not _is_within(_MAX_NUMBER, self.memory_limit):
            yield _must_be("memory_limit", f"from 0 to {_MAX_NUMBER:g} bytes", self.memory_limit)

    def _errors_in_choices(self) -> Iterator[str | Message]:
        yield from objective_errors(self.objective)
        if not isinstance(self.placement, Placement):
            if self.placement not in _PLACEMENTS:
                yield _must_be("placement", f"a Placement, or one of {', '.join(_PLACEMENTS)}", self.placement)
        elif self.placement.num_ranks != self.ranks:
            ranks = Parameter("ranks", self.ranks)
            yield Message(f"the placement has {plural(self.placement.num_ranks, 'rank')} (given ", ranks, ")")
        if self.graph is not None:
            yield from self._errors_in_graph(self.graph)
        if not isinstance(self.costs, Costs | None):
            yield f"costs must be Costs (given {printable(repr(self.costs))})"

    def _errors_in_graph(self, graph: StageGraph) -> Iterator[str | Message]:
        if not isinstance(graph, StageGraph):
            yield _must_be("graph", "a StageGraph", graph)
            return
        if isinstance(self.placement, Placement):
            if self.placement.num_stages != graph.num_stages:
                given = f"{plural(self.placement.num_stages, 'stage')}, the graph {graph.num_stages}"
                yield f"the placement has {given}"
        elif self.placement != "any":
            yield Message("with a graph, ", _must_be("placement", "a Placement or any", self.placement))
        elif (whole_number(self.ranks) or 0) > graph.num_stages:
            yield f"the graph has {plural(graph.num_stages, 'stage')}, too few for {plural(self.ranks, 'rank')}"
        if self.stages_per_rank != 1:
            yield graph_and_stages(self.stages_per_rank)

    def _errors_in_jitter(self, jitter: float) -> Iterator[Message]:
        if not _is_within(1, jitter):
            yield _must_be("jitter", "a share from 0 to 1", jitter)
        if not (_is_within(1, self.quantile) and 0 < self.quantile < 1):
            yield _must_be("quantile", "between 0 and 1", self.quantile)
        if self.objective != "makespan":
            yield jitter_needs_makespan(self.objective)

    def placements(self) -> list[Placement]:
        """The placements to search, each small enough and with costs for its stages."""
        found = self._named_placements()
        for each in found:
            if each.num_stages * int(self.microbatches) > _MAX_SEARCHED:
                given = f"{plural(each.num_stages, 'stage')}, {plural(self.microbatches, 'microbatch')}"
                raise SearchError(f"stages times microbatches can be at most {_MAX_SEARCHED} (given {given})")
            graph = self.graph or StageGraph.chain(each.num_stages)
            (self.costs or Costs()).check_lengths(graph, each.num_ranks)
        return found

    def _named_placements(self) -> list[Placement]:
        if isinstance(self.placement, Placement):
            return [self.placement]
        ranks, stages = int(self.ranks), self.stages_per_rank
        if self.graph is not None:
            return [topological_placement(self.graph, ranks)]
        try:
            named = {"loop": Placement.loop(ranks, stages), "v": Placement.v(ranks, stages)}
        except PenstockError as error:
            raise SearchError(str(error)) from None
        return list(dict.fromkeys(named.values())) if self.placement == "any" else [named[self.placement]]

    def limit(self) -> tuple[Costs, float | None]:
        """The memory limit, and the costs that it applies to: with `live_limit` an activation counts 1."""
        costs = self.costs or Costs()
        if self.live_limit is not None:
            return counting_activations(costs), min(int(self.live_limit), MAX_WORK)
        return costs, None if self.memory_limit is None else float(self.memory_limit)


def _must_be(name: str, what: str, given: object) -> Message:
    return Message(Parameter(name), f" must be {what} (given {printable(repr(given))})")


def _is_within(most: float, value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= cast("float", value) <= most


def require_bytes(memory_limit: float | None) -> None:
    """Memory policies change bytes, not the number of live activations."""
    if memory_limit is None:
        raise SearchError(
            *(Parameter("recompute"), " and ", Parameter("offload"), " need ", Parameter("memory_limit")),
            ", in bytes per rank: without it nothing needs them",
        )


def require_memory(placements: list[Placement], costs: Costs, limit: float | None) -> None:
    """One microbatch at a time needs the least memory; if a rank has less, no schedule fits."""
    if limit is None:
        return
    errors = []
    for placement in placements:
        activation = activation_bytes(costs, placement.num_stages).full
        fixed, limits = fixed_bytes(costs, placement), activation_limits(costs, placement, limit)
        for rank, own in enumerate(placement.stages_of_rank):
            held = sum(activation[stage] for stage in own)
            if held > limits[rank]:
                errors.append(f"rank {rank} needs {costs.units.memory(fixed[rank] + held)}")
    if errors:
        what = "for parameters, gradients, optimizer state and one microbatch of each of its stages"
        raise SearchError(
            f"no schedule fits the memory limit of {costs.units.memory(limit)} per rank: "
            f"{some(errors, 4, '; ')}, {what}"
        )


def objective_errors(objective: str) -> Iterator[Message]:
    """Yield why this is no objective, if it is none."""
    if objective not in OBJECTIVES:
        yield _must_be("objective", f"one of {', '.join(OBJECTIVES)}", objective)


def check_memory_limit(limit: object) -> None:
    """Raise `SearchError` unless this is a number of bytes."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise SearchError(_must_be("memory_limit", "a number of bytes, at least 0", limit))


def jitter_needs_makespan(objective: object) -> Message:
    """Return the refusal of jitter with another objective than the makespan."""
    given = Parameter("objective", objective)
    return Message(Parameter("jitter"), " is supported for the makespan only (given ", given, ")")


@dataclass(frozen=True)
class Progress:
    """The state of a running search or plan."""

    phase: str
    best: float
    """The objective of the best schedule so far, in seconds."""
    bound: float
    seconds: float
    """Since the start."""
    fraction: float
    """Of the budget of the phase, from 0 to 1."""

    @property
    def gap(self) -> float:
        """Of the best so far, as a share of the bound."""
        return gap_of(self.best, self.bound)


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class SearchResult(Displayed):
    """The best schedule found.

    `value` is its objective in seconds. No schedule of the same work within the memory limit has a lower
    objective than `bound.seconds`, so the optimality gap is at most `gap`, a share of the bound.
    """

    schedule: Schedule
    timeline: Timeline
    objective: str
    value: float
    bound: Bound
    found_by: str
    """How the order was found."""
    families: Mapping[str, float]
    """The objective of every family that does the same work within the limit."""
    too_large: Mapping[str, float]
    """Peak memory in bytes of the families that exceed the limit."""
    skipped: tuple[str, ...]
    """Families that were not tried, because the time limit was reached."""
    runs: int
    """Number of orders evaluated."""
    seconds: float
    interrupted: bool
    """Whether Ctrl-C ended the search early."""
    missing: tuple[str, ...]
    """Optional parts that are not installed."""
    quantile: float | None
    """With `jitter`: the quantile of the makespan under jitter."""

    def __repr__(self) -> str:
        value = self.timeline.costs.units.time(self.value)
        quality = "proved optimal" if self.proved else f"gap <= {self.gap:.2%}"
        return f"<SearchResult: {self.objective} {value}, {quality}, found by {self.found_by}>"

    @property
    def origin(self) -> str:
        """How the order was found, and among how many, if the search evaluated orders of its own."""
        return (
            f"{self.found_by} ({plural(f'{self.runs:,}', 'order')} evaluated)" if self.runs else self.found_by
        )

    @property
    def gap(self) -> float:
        """The excess over the bound, as a share of the bound."""
        return self.bound.gap(self.value)

    @property
    def proved(self) -> bool:
        """Whether the schedule is proved optimal."""
        return self.gap == 0

    def to_rows(self) -> list[dict[str, Any]]:
        """The result, then the families of the same work; memory in bytes where it is known.

        A family within the limit has a `value`, one that exceeds the limit has its `peak_memory`.
        """
        found = [{"schedule": "result", "value": self.value, "peak_memory": max(self.timeline.peak_memory)}]
        fitting = sorted(self.families.items(), key=lambda item: item[1])
        found += [{"schedule": name, "value": value, "peak_memory": None} for name, value in fitting]
        large = self.too_large.items()
        return found + [{"schedule": name, "value": None, "peak_memory": size} for name, size in large]


@dataclass(frozen=True)
class Budget:
    """Seconds, or a number of moves, with which a seed fixes the result."""

    seconds: float
    moves: int | None
    seed: int

    def fraction(self, seconds: float, moves: int) -> float:
        """The share of the budget that so many seconds, or moves, have used."""
        used, whole = (seconds, self.seconds) if self.moves is None else (moves, self.moves)
        return min(used / whole, 1.0) if whole else 1.0

    def is_over(self, seconds: float) -> bool:
        """Whether so many seconds have used it up; a number of moves has no time limit."""
        return self.moves is None and seconds >= self.seconds

    def part(self, share: float) -> Budget:
        """A share of the budget."""
        moves = None if self.moves is None else int(share * self.moves)
        return Budget(share * self.seconds, moves, self.seed)


@dataclass(frozen=True)
class Jitter:
    """Rank schedules by a quantile of their makespan when the duration of steps varies by `share`."""

    share: float
    quantile: float

    def best(
        self, schedules: Sequence[Schedule], costs: Costs, seed: int, is_over: Callable[[], bool]
    ) -> tuple[int, float]:
        """The position of the schedule with the lowest quantile, and the quantile.

        When time is over, only the schedules so far are compared, at least the first.
        """
        found: list[tuple[float, int]] = []
        for position, schedule in enumerate(schedules):
            if found and is_over():
                break
            spread = simulate_with_jitter(schedule, costs, jitter=self.share, seed=seed)
            found.append((spread.quantile(self.quantile), position))
        quantile, position = min(found)
        return position, quantile
