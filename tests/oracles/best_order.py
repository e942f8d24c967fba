"""The best order of a small pipeline by trying all with ascending microbatches: an oracle of search and bounds.

It shares nothing with the library except `Costs`, `Placement` and the edges of a graph. Steps are dispatched in
ascending order of their start, each as early as possible, and a branch ends where the work that is left cannot
beat the best.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock import Costs, Placement, StageGraph

__all__ = ["best_value"]

Value = TypeVar("Value")
Key = tuple[int, int]
"""A stage and a microbatch."""


def best_value(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: float | None,
    *,
    split: bool,
    objective: str,
    graph: StageGraph | None = None,
    pairs: bool = False,
) -> float:
    """The least makespan or span of F, I, W and B within a memory limit, microbatches ascending on every rank.

    With `pairs` also of overlapped pairs, whose seconds follow from compute and all-to-all alone.
    """
    graph = graph or StageGraph.chain(placement.num_stages)
    trial = _Trial(placement, microbatches, costs, limit, split, objective, graph.edges, pairs)
    ranks = placement.num_ranks
    trial.extend(_State((0.0,) * ranks, (None,) * ranks, (0.0,) * ranks))
    return trial.best


@dataclass(frozen=True)
class _State:
    clock: tuple[float, ...]
    first: tuple[float | None, ...]
    """Per rank: its first start."""
    live: tuple[float, ...]
    forward: frozenset[Key] = frozenset()
    backward: frozenset[Key] = frozenset()
    weight: frozenset[Key] = frozenset()
    arrived: frozenset[tuple[str, Key, int, float]] = frozenset()
    """Inputs of F and of I or B that were computed: from which stage, and when each arrives."""
    free: frozenset[tuple[Key, float]] = frozenset()
    """When a channel, from rank to rank, has taken its last message."""
    last: float = 0.0


@dataclass
class _Trial:
    placement: Placement
    microbatches: int
    costs: Costs
    limit: float | None
    split: bool
    objective: str
    edges: tuple[tuple[int, int], ...]
    pairs: bool
    best: float = float("inf")
    seen: set[_State] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hosts, count = self.placement.stage_to_rank, self.placement.num_stages
        launch = self.costs.launch_overhead
        names = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
        self.compute = {k: self.costs.per_stage(n, count) for k, n in names.items()}
        self.compute["B"] = self.costs.full_backward(count)
        self.sent = {k: self.costs.per_stage(f"{n}_all_to_all", count) for k, n in names.items()}
        self.sent["B"] = [i + w for i, w in zip(self.sent["I"], self.sent["W"])]
        self.seconds = {
            kind: [c + a + launch for c, a in zip(compute, self.sent[kind])]
            for kind, compute in self.compute.items()
        }
        self.held = self.costs.per_stage("activation", count)
        self.freed = self.costs.per_stage("activation_freed_by_input", count)

    def extend(self, state: _State) -> None:
        """Try everything that can follow."""
        value = self._least(state)
        if value >= self.best - 1e-9 or state in self.seen:
            return
        self.seen.add(state)
        if len(state.weight) == len(self.hosts) * self.microbatches:
            self.best = value
        for start, kind, key in sorted(self._choices(state)):
            if start >= state.last - 1e-9:
                end = start + self.seconds[kind][key[0]]
                self.extend(self._taken(state, start, kind, key, end))
        for start, forward, kind, key in sorted(self._pair_choices(state)) if self.pairs else ():
            if start >= state.last - 1e-9:
                end = start + self._pair_seconds(forward[0], kind, key[0])
                self.extend(self._taken(self._taken(state, start, "F", forward, end), start, kind, key, end))

    def _pair_choices(self, state: _State) -> list[tuple[float, Key, str, Key]]:
        """Start of a forward and a backward of one rank that can run as a pair, and both of them."""
        choices = self._choices(state)
        return [
            (max(start, other), forward, kind, key)
            for start, _, forward in (each for each in choices if each[1] == "F")
            for other, kind, key in choices
            if kind in "IB" and self.hosts[key[0]] == self.hosts[forward[0]]
        ]

    def _pair_seconds(self, forward: int, kind: str, back: int) -> float:
        parts = [("F", forward), *((each, back) for each in ("I" if kind == "I" else "IW"))]
        alone = [self.compute[each][stage] + self.sent[each][stage] for each, stage in parts]
        streams = [sum(by[each][stage] for each, stage in parts) for by in (self.compute, self.sent)]
        return max(*alone, *streams) + self.costs.launch_overhead

    def _least(self, state: _State) -> float:
        """What the objective is at least, given what is done."""
        left = [0.0] * self.placement.num_ranks
        least = self.compute if self.pairs else self.seconds  # pairs hide all else
        for stage, rank in enumerate(self.hosts):
            i, w, b = (least[kind][stage] for kind in "IWB")
            for key in ((stage, k) for k in range(self.microbatches)):
                left[rank] += 0.0 if key in state.forward else least["F"][stage]
                if key not in state.backward:
                    left[rank] += min(i + w, b) if self.split else b
                elif key not in state.weight:
                    left[rank] += w
        ends = [max(now, state.last if more else 0.0) + more for now, more in zip(state.clock, left)]
        if self.objective == "makespan":
            return max(ends)
        begun = [begin is not None for begin in state.first]
        spans = [now - (begin or 0.0) + more for now, begin, more in zip(state.clock, state.first, left)]
        return max(span if has else more for span, has, more in zip(spans, begun, left))

    def _choices(self, state: _State) -> list[tuple[float, str, Key]]:
        """Start, kind and key of the next F, I or B, and W of each stage; microbatches are alike."""
        found = []
        for stage, rank in enumerate(self.hosts):
            now, keys = state.clock[rank], [(stage, k) for k in range(self.microbatches)]
            for key in [key for key in keys if key not in state.forward][:1]:
                fits = self.limit is None or state.live[rank] + self.held[stage] <= self.limit + 1e-9
                inputs = {source for source, target in self.edges if target == stage}
                if fits and (times := _arrivals(state, "F", key, inputs)) is not None:
                    found.append((max([now, *times]), "F", key))
            for key in [key for key in keys if key not in state.backward][:1]:
                fed = {target for source, target in self.edges if source == stage}
                if key in state.forward and (times := _arrivals(state, "I", key, fed)) is not None:
                    start = max([now, *times])
                    found += [(start, kind, key) for kind in ("BI" if self.split else "B")]
            found += [(now, "W", key) for key in keys if key in state.backward - state.weight][:1]
        return found

    def _taken(self, state: _State, start: float, kind: str, key: Key, end: float) -> _State:
        stage, microbatch = key
        rank = self.hosts[stage]
        held, freed = self.held[stage], self.freed[stage]
        change = {"F": held, "I": -freed, "W": freed - held, "B": -held}[kind]
        then = replace(
            state,
            clock=_changed(state.clock, rank, end),
            first=_changed(state.first, rank, start) if state.first[rank] is None else state.first,
            live=_changed(state.live, rank, state.live[rank] + change),
            forward=state.forward | ({key} if kind == "F" else set()),
            backward=state.backward | ({key} if kind in "IB" else set()),
            weight=state.weight | ({key} if kind in "WB" else set()),
            last=start,
        )
        if kind == "W":
            return then
        crossed: dict[int, float] = {}  # per rank: when the activation arrives there
        for number, (source, target) in self._sends(kind, stage):
            other = target if kind == "F" else source
            if kind == "F" and self.hosts[other] in crossed:
                arrival, free = crossed[self.hosts[other]], then.free
            else:
                arrival, free = self._sent(then, kind, number, stage, other, end)
                crossed[self.hosts[other]] = arrival
            arrived = {("F" if kind == "F" else "I", (other, microbatch), stage, arrival)}
            then = replace(then, arrived=then.arrived | arrived, free=free)
        return then

    def _sends(self, kind: str, stage: int) -> list[tuple[int, tuple[int, int]]]:
        """The edges that an activation or a gradient of a stage travels on."""
        end = 0 if kind == "F" else 1
        return [(number, edge) for number, edge in enumerate(self.edges) if edge[end] == stage]

    def _sent(
        self, state: _State, kind: str, edge: int, stage: int, target: int, end: float
    ) -> tuple[float, frozenset[tuple[Key, float]]]:
        """When a message arrives, and when channels are free then."""
        channel = self.hosts[stage], self.hosts[target]
        if channel[0] == channel[1]:
            return end, state.free
        count = len(self.edges)
        latency = self.costs.per_edge("latency", count)[edge]
        if self.costs.bandwidth is None:
            return end + latency, state.free
        name = "activation_message" if kind == "F" else "gradient_message"
        seconds = self.costs.per_edge(name, count)[edge] / self.costs.per_edge("bandwidth", count)[edge]
        free = dict(state.free)
        free[channel] = max(end, free.get(channel, 0.0)) + seconds
        return free[channel] + latency, frozenset(free.items())


def _arrivals(state: _State, kind: str, key: Key, sources: set[int]) -> list[float] | None:
    """When the inputs of a step arrive; None if one of them is not computed yet."""
    times = {source: time for what, of, source, time in state.arrived if (what, of) == (kind, key)}
    return list(times.values()) if set(times) == sources else None


def _changed(values: tuple[Value, ...], at: int, value: Value) -> tuple[Value, ...]:
    return (*values[:at], value, *values[at + 1 :])
