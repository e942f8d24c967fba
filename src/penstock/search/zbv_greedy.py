"""ZB-V for given costs: a greedy schedule that places weight gradients where a rank would otherwise idle.

Rank r has stage a = r on the way down and b = 2p - 1 - r on the way up. One pass has four phases:

1. Fill. Each rank takes one F(a). Then, from the last rank up, a rank admits further microbatches, through all
   ranks above it, as long as they end before its first F(b) can start, and takes that F(b).
2. Level. Down the ranks, each takes forwards, alternating a and b, until it has as many as the rank above.
3. Rounds, 2m of them. Each rank takes one input gradient, then at most one forward, of the later of its stages
   (I(a), F(b)) if its input is available. Before either, deferred W are placed where they fit into the wait
   entirely; one more is placed although it delays the rank, if waiting would exceed the allowed idle time.
4. Drain. The remaining W.

The allowed idle time is the longest of any rank so far. A further pass also allows a rank the difference
between its idle time and the longest in the pass before; passes repeat while the longest idle time decreases.
This is done with and without the delaying W before F and before I(b), and the best of the four results is
taken. These are the rules by which Qi et al. (2024, "Zero Bubble Pipeline Parallelism") made their ZB-V tables,
reproduced exactly.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import product

from penstock.cost.costs import Costs
from penstock.cost.memory import stage_bytes
from penstock.cost.prices import ALL_TO_ALL, action_seconds
from penstock.errors import BuildError, CostsError
from penstock.families.rank_order import keep_microbatches
from penstock.ir.encoding import code_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["zbv_greedy"]


def zbv_greedy(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> Schedule:
    """The schedule for stages of equal cost; `memory_limit` is in bytes of activations per rank.

    Without a limit each rank may hold 2p activations, the minimum. Fewer than p microbatches are scheduled as
    p, and the surplus is removed.
    """
    if ranks < 1 or microbatches < 1:
        raise BuildError(f"ranks and microbatches must be at least 1 (given {ranks} and {microbatches})")
    instance = _Instance.of(ranks, max(ranks, microbatches), costs, memory_limit)
    rows: list[list[int]] = []
    shortest = math.inf
    for eager_input, eager_forward in product((True, False), repeat=2):
        allowance, worst = [0.0] * ranks, math.inf
        while True:
            attempt = _Pass(instance, allowance)
            attempt.run(eager_input=eager_input, eager_forward=eager_forward)
            if attempt.worst < shortest:
                rows, shortest = attempt.rows, attempt.worst
            if attempt.worst >= worst:
                break
            allowance, worst = [attempt.worst - idle for idle in attempt.idle], attempt.worst
    kept = [keep_microbatches(row, microbatches) for row in rows]
    return Schedule.from_codes(kept, Placement.v(ranks, 2), microbatches, "zbv-greedy")


@dataclass(frozen=True)
class _Instance:
    ranks: int
    microbatches: int
    seconds: dict[Kind, float]
    hop: float
    memory: dict[Kind, float]
    """Bytes that a step allocates, or, if negative, releases."""
    limit: float

    @classmethod
    def of(cls, ranks: int, microbatches: int, costs: Costs, limit: float | None) -> _Instance:
        names = (
            "forward",
            "backward_input",
            "backward_weight",
            "latency",
            "activation",
            "activation_freed_by_input",
            *ALL_TO_ALL,
        )
        values = [getattr(costs, name) for name in names]
        if uneven := [name for name, value in zip(names, values) if isinstance(value, tuple)]:
            raise CostsError(f"{', '.join(uneven)}: zbv-greedy needs stages of equal cost")
        hop, held = values[3], values[4]
        least = 2 * ranks * held
        if limit is not None and limit < least:
            raise BuildError(
                f"zbv-greedy needs memory for {2 * ranks} activations, {least} bytes (given {limit})"
            )
        kinds = (Kind.F, Kind.I, Kind.W)
        own = Costs(**dict(zip(names, values)))
        seconds, sizes = action_seconds(own, 1), stage_bytes(own, 1, MemoryLine.ACTIVATIONS)
        return cls(
            ranks,
            microbatches,
            {kind: float(seconds[kind.number, 0]) for kind in kinds},
            hop,
            {kind: float(sizes[kind.number, 0]) for kind in kinds},
            least if limit is None else limit,
        )


class _Pass:
    """One pass of the four phases."""

    def __init__(self, instance: _Instance, allowance: list[float]) -> None:
        self.instance, self.allowance, self.p, self.m = (
            instance,
            allowance,
            instance.ranks,
            instance.microbatches,
        )
        self.rows: list[list[int]] = [[] for _ in range(self.p)]
        placement = Placement.v(self.p, 2)
        self.rank_of = rank_of = placement.stage_to_rank
        self.stages_of = placement.stages_of_rank  # a and b of each rank
        stages = range(placement.num_stages)
        edges = [(s, t) for s, t in StageGraph.chain(placement.num_stages).edges if rank_of[s] != rank_of[t]]
        # the stage of another rank that a step gets its input from
        self.sources: dict[Kind, dict[int, int]] = {
            Kind.F: {t: s for s, t in edges},
            Kind.I: dict(edges),
            Kind.W: {},
        }
        self.ends: dict[tuple[Kind, int], list[float]] = {(k, s): [] for k in instance.seconds for s in stages}
        self.clock, self.held = [0.0] * self.p, [0.0] * self.p
        self.idle, self.worst = [0.0] * self.p, 0.0  # since a rank's first forward
        self.deferred: list[deque[int]] = [deque() for _ in range(self.p)]  # stages with a deferred W

    def run(self, *, eager_input: bool, eager_forward: bool) -> None:
        """Fill, level, rounds, drain."""
        self._fill()
        self._level()
        for _ in range(2 * self.m):
            up = [r for r in range(self.p) if self._goes_up(r)]
            for r in reversed(up):
                self._take_filled(Kind.I, self.stages_of[r][0], eager=True)
            for r in range(self.p):
                if r not in up:
                    self._take_filled(Kind.I, self.stages_of[r][1], eager=eager_input)
            for r in range(self.p):
                stage = self._next_forward(r)
                if stage is not None:
                    self._take_filled(Kind.F, stage, eager=eager_forward)
        for r in range(self.p):
            while self.deferred[r]:
                self._take_weight(r)

    def _fill(self) -> None:
        f, size = self.instance.seconds[Kind.F], self.instance.memory[Kind.F]
        for a, _ in self.stages_of:
            self._take(Kind.F, a)
        for r, (a, b) in reversed(list(enumerate(self.stages_of))):
            due = self._arrival(Kind.F, b) or 0.0
            while (
                self.clock[r] + f <= due
                and self.held[r] + (2 + 2 * r) * size <= self.instance.limit
                and self._count(Kind.F, a) < self.m - r
            ):
                for above, _ in self.stages_of[: r + 1]:
                    self._take(Kind.F, above)
            self._take(Kind.F, b)

    def _level(self) -> None:
        on_b = False  # alternates across ranks
        for r in range(1, self.p):
            a, b = self.stages_of[r]
            above_a, above_b = (self._count(Kind.F, stage) for stage in self.stages_of[r - 1])
            while (
                self._count(Kind.F, a) + self._count(Kind.F, b) < above_a + above_b
                or self._count(Kind.F, b) <= above_b < self.m
            ):
                for stages in reversed(self.stages_of[r:]):
                    if self._count(Kind.F, stages[on_b]) < self.m:
                        self._take(Kind.F, stages[on_b])
                on_b = not on_b

    def _goes_up(self, r: int) -> bool:
        """Whether this round's input gradient on rank r is I(a), not I(b)."""
        a, b = self.stages_of[r]
        done_a, done_b = self._count(Kind.I, a), self._count(Kind.I, b)
        return done_a < done_b and (done_b == self.m or self._arrival(Kind.I, a) is not None)

    def _next_forward(self, r: int) -> int | None:
        a, b = self.stages_of[r]
        done_a, done_b = self._count(Kind.F, a), self._count(Kind.F, b)
        if done_b == self.m:
            return None
        if done_b == done_a:
            return a
        if self._arrival(Kind.F, b) is not None:
            return b
        return a if done_a < self.m and self._arrival(Kind.F, a) is not None else None

    def _take_filled(self, kind: Kind, stage: int, *, eager: bool) -> None:
        """Take a step, and before it W that release memory, fit into the wait, or limit the idle time."""
        r = self.rank_of[stage]
        pending, w = self.deferred[r], self.instance.seconds[Kind.W]
        while pending and self.held[r] + self.instance.memory[kind] > self.instance.limit:
            self._take_weight(r)
        arrival = self._arrival(kind, stage) or 0.0
        while pending and self.clock[r] + w <= arrival:
            self._take_weight(r)
        if eager and pending and self.idle[r] + arrival - self.clock[r] > max(self.worst, self.allowance[r]):
            self._take_weight(r)
        self._take(kind, stage)

    def _take_weight(self, r: int) -> None:
        self._take(Kind.W, self.deferred[r].popleft())

    def _take(self, kind: Kind, stage: int) -> None:
        r, microbatch, arrival = self.rank_of[stage], self._count(kind, stage), self._arrival(kind, stage)
        assert arrival is not None
        assert microbatch < self.m
        self.held[r] += self.instance.memory[kind]
        start = max(self.clock[r], arrival)
        if self.rows[r]:
            self.idle[r] += start - self.clock[r]
            self.worst = max(self.worst, self.idle[r])
        self.clock[r] = start + self.instance.seconds[kind]
        self.ends[kind, stage].append(self.clock[r])
        self.rows[r].append(code_of(kind, stage, microbatch))
        if kind is Kind.I:
            self.deferred[r].append(stage)

    def _arrival(self, kind: Kind, stage: int) -> float | None:
        """When the next input arrives: 0 if it comes from no other rank, None if it is not computed yet."""
        source = self.sources[kind].get(stage)
        if source is None:
            return 0.0
        ends, microbatch = self.ends[kind, source], self._count(kind, stage)
        return ends[microbatch] + self.instance.hop if microbatch < len(ends) else None

    def _count(self, kind: Kind, stage: int) -> int:
        return len(self.ends[kind, stage])
