"""A scheduling problem: work, costs and limits; orders are arrays of tokens (see `kernel`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.bounds import OBJECTIVES, Workload
from penstock.cost.costs import Costs
from penstock.cost.memory import activation_limits, stage_bytes
from penstock.cost.prices import action_seconds, pair_seconds, pairs_can_pay, stream_seconds
from penstock.errors import ScheduleError
from penstock.ir.encoding import (
    JOINED,
    KIND_SHIFT,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Bools,
    Floats,
    Ints,
    stable_order,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.search import kernel
from penstock.search.kernel import (
    FORWARD,
    INPUT_GRAD,
    MAKESPAN,
    PAIRED,
    SEPARATE,
    TOKEN,
    WEIGHT_GRAD,
    ProblemArrays,
    empty_state,
    message_arrays,
)
from penstock.simulation.simulator import Simulator

# Numbering: which microbatch each entry of an order has, and which entries are one step.
#
# Orders have kinds and stages only (see `kernel`). F and I are numbered in ascending order. A W that is
# one B with the I ahead of it has its number; the other W of a stage have the numbers of its other I, in order:
#
#     order         F F I W F I I W W
#     microbatch    0 1 0 0 2 1 2 1 2        the first I and W are one B


class Numbered(NamedTuple):
    """Per entry of an order."""

    token: Ints
    microbatch: Ints
    is_joined: Bools
    """Whether it is one step with the entry ahead of it: a W that is B with its I, an I in a pair with an F."""


def number_entries(arrays: ProblemArrays, order: Ints, fused: Collection[int] = ()) -> Numbered:
    """The numbers of a whole order; on the stages `fused`, every I directly followed by a W is one B."""
    token = order & TOKEN
    stage, kind = token // 3, token % 3
    is_weight = kind == WEIGHT_GRAD
    previous = np.append(-1, token[:-1])
    previous[arrays.rank_bounds[:-1][np.diff(arrays.rank_bounds) > 0]] = -1
    follows_forward = (previous >= 0) & (previous % 3 == FORWARD)
    is_paired = (kind == INPUT_GRAD) & (order & PAIRED != 0) & follows_forward & arrays.can_pair
    is_shorter = (arrays.fused_seconds >= 0)[stage] | np.append(False, is_paired[:-1])
    can_join = ((order == token) & is_shorter) | np.isin(stage, list(fused))
    is_joined = is_weight & can_join & (previous == token - 1)
    microbatch = np.where(is_weight, 0, occurrences(token))
    joined = np.flatnonzero(is_joined)
    microbatch[joined] = microbatch[joined - 1]
    is_taken = np.append(is_joined[1:], False)  # an I whose W is the entry behind it
    made, used = (
        _by_stage(each, stage, len(arrays.rank_of_stage))
        for each in ((kind == INPUT_GRAD) & ~is_taken, is_weight & ~is_joined)
    )
    if arrays.kinds == 3:
        microbatch[used] = microbatch[made]
    return Numbered(token, microbatch, is_joined | is_paired)


def _by_stage(chosen: Bools, stage: Ints, stages: int) -> Ints:
    """The positions of the chosen entries, stage by stage, in the order of the list within each."""
    positions = np.flatnonzero(chosen)
    return positions[stable_order(stage[positions], stages)]


def occurrences(token: Ints) -> Ints:
    """Per entry: how many entries ahead of it have the same token."""
    counts = np.bincount(token)
    by_token = stable_order(token, len(counts))
    found = np.empty_like(token)
    found[by_token] = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


# Overlapped pairs in a search: their seconds, and orders whose adjacent F and I become pairs.


def pair_prices(costs: Costs, placement: Placement, *, split: bool) -> Floats | None:
    """Seconds of a pair by its forward's stage, its backward's stage, and whether that is I (0) or B (1).

    None if no pair of two stages of a rank takes less than its parts. A launch that a pair saves does not
    count: a pair is worth its code where something is hidden.
    """
    if not pairs_can_pay(costs):
        return None
    stages = placement.num_stages
    streams, alone = stream_seconds(costs, stages), action_seconds(costs, stages)
    first = streams.of(Kind.F.number, np.arange(stages)[:, None])
    kinds = (Kind.I if split else Kind.B, Kind.B)
    prices = np.stack(
        [pair_seconds(costs, first, streams.of(kind.number, np.arange(stages)[None, :])) for kind in kinds], -1
    )
    apart = np.stack([alone[Kind.F.number][:, None] + alone[kind.number][None, :] for kind in kinds], -1)
    rank_of_stage = np.array(placement.stage_to_rank)
    together = rank_of_stage[:, None] == rank_of_stage[None, :]
    if not (prices[together] < apart[together] * (1 - 1e-12)).any():
        return None
    return prices + float(costs.launch_overhead)


def pair_variants(order: Ints, rank_bounds: Ints) -> Iterator[Ints]:
    """The order without pairs; with every adjacent F and I as a pair; and with forwards advanced for it."""
    plain = order & ~PAIRED
    yield plain
    rows = [plain[first:last].tolist() for first, last in pairwise(rank_bounds.tolist())]
    for advance in (False, True):
        paired = [_paired(_advanced(row) if advance else row) for row in rows]
        yield np.array([entry for row in paired for entry in row], dtype=np.int64)


def _advanced(row: list[int]) -> list[int]:
    """With the F that follows a backward ahead of it: I W F becomes F I W."""
    found: list[int] = []
    overtaken = 0  # up to here, every backward has its F
    for entry in row:
        at = len(found)
        if (entry & TOKEN) % 3 == FORWARD:
            at -= bool(found) and (found[-1] & TOKEN) % 3 == WEIGHT_GRAD
            is_behind = at > overtaken and (found[at - 1] & TOKEN) % 3 == INPUT_GRAD
            at = at - 1 if is_behind else len(found)
            overtaken = at + 2 if is_behind else overtaken
        found.insert(at, entry)
    return found


def _paired(row: list[int]) -> list[int]:
    """With every I directly behind an F in a pair, unless it needs that F, and its W in the pair too."""
    done: dict[int, int] = {}
    found: list[int] = []
    for entry in row:
        token = entry & TOKEN
        last = found[-1] if found else -1
        if token % 3 == INPUT_GRAD and last >= 0 and (last & TOKEN) % 3 == FORWARD:
            needs_it = (last & TOKEN) == token - 1 and done[token - 1] == done.get(token, 0) + 1
            entry = token if needs_it else token | PAIRED  # noqa: PLW2901 -- the same entry with its flag
        elif token % 3 == WEIGHT_GRAD and last == token - 1 | PAIRED:
            entry = token  # noqa: PLW2901 -- the same entry without its flag
        done[token] = done.get(token, 0) + 1
        found.append(entry)
    return found


_TOKEN_KIND = {Kind.F: FORWARD, Kind.I: INPUT_GRAD, Kind.B: INPUT_GRAD, Kind.W: WEIGHT_GRAD}
_TOKENS = np.array([_TOKEN_KIND.get(kind, -1) for kind in sorted(Kind, key=lambda kind: kind.number)])
"""The same by the number of a kind."""
_SKIPPED = tuple(kind for kind in Kind if kind.is_point or kind.is_collective)
"""Kinds that follow from the order of compute: lowering adds them."""


@dataclass(frozen=True)
class Problem:
    """The work to order, its costs and the memory limit.

    All microbatches cost the same, so an order has kinds and stages only: within each, microbatches run in
    ascending order. That loses no makespan. A span can be shorter with microbatches out of order: bounds hold
    for these too, but a search has none of them.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: float | None = None
    """Bytes per rank, parameters and optimizer state included; None for no limit."""
    objective: str = "makespan"
    split: bool = True
    """Whether backwards may be split into I and W."""
    graph: StageGraph | None = None
    """Which stage feeds which; a chain unless given."""

    @cached_property
    def arrays(self) -> ProblemArrays:
        """The problem as arrays."""
        kinds, n = 3 if self.split else 2, self.placement.num_stages
        seconds = action_seconds(self.costs, n) + float(self.costs.launch_overhead)
        change = stage_bytes(self.costs, n, MemoryLine.ACTIVATIONS)
        if not self.split:
            change[Kind.W.number] = 0.0
        limit = np.inf if self.memory_limit is None else self.memory_limit
        sizes = [len(own) * kinds * self.microbatches for own in self.placement.stages_of_rank]
        messages = message_arrays(self.stage_graph, self.placement, self.costs)
        return ProblemArrays(
            rank_bounds=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
            rank_of_stage=np.array(self.placement.stage_to_rank, dtype=np.int64),
            microbatches=self.microbatches,
            kinds=kinds,
            seconds=self._by_token(seconds),
            fused_seconds=self.fused_seconds,
            can_fuse=bool((self.fused_seconds >= 0).any()) or (self.can_pair and self.split),
            pair_seconds=np.zeros((0, 0, 2)) if self._pair_prices is None else self._pair_prices,
            can_pair=self.can_pair,
            stage_order=np.array(self.stage_graph.forward_order, dtype=np.int64),
            messages=messages,
            num_channels=self.placement.num_ranks**2,
            has_queues=bool(messages.seconds.any()),
            memory_change=self._by_token(change),
            memory_limits=activation_limits(self.costs, self.placement, limit),
            optimizer_step=float(self.costs.optimizer_step),
        )

    @cached_property
    def stage_graph(self) -> StageGraph:
        """Which stage feeds which."""
        return self.graph or StageGraph.chain(self.placement.num_stages)

    @property
    def work(self) -> Workload:
        """The workload that bounds are computed for."""
        m, costs = self.microbatches, self.costs
        return Workload(self.placement, m, costs, split=self.split, paired=self.can_pair, graph=self.graph)

    def _by_token(self, by_kind: Floats) -> Floats:
        """Per token, from an array per kind and stage."""
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W)
        return np.ascontiguousarray(by_kind[[kind.number for kind in kinds]].T.reshape(-1))

    @cached_property
    def fused_seconds(self) -> Floats:
        """Per stage: seconds of B where I and W take longer, -1 elsewhere."""
        seconds = action_seconds(self.costs, self.placement.num_stages)
        i, w, b = (seconds[kind.number] for kind in (Kind.I, Kind.W, Kind.B))
        fused, split = b + self.costs.launch_overhead, i + w + 2 * self.costs.launch_overhead
        is_shorter = (fused < split * (1 - 1e-12)) & self.split
        return np.where(is_shorter, fused, -1.0)

    @cached_property
    def _pair_prices(self) -> Floats | None:
        return pair_prices(self.costs, self.placement, split=self.split)

    @property
    def can_pair(self) -> bool:
        """Whether a pair of F and I, or F and B, can take less than its parts."""
        return self._pair_prices is not None

    # --- orders ------------------------------------------------------------------------------------

    def order_of(self, schedule: Schedule) -> Ints:
        """The order of a schedule; backwards split or fused as required, pairs separated if none can pay."""
        schedule.table.require_handled((*_TOKEN_KIND, *_SKIPPED), "search")
        if schedule.graph != self.stage_graph:
            raise ScheduleError(f"search: {schedule.name} has another stage graph than the problem")
        table = schedule.table
        taken = table.of_kind(*(kind for kind in _TOKEN_KIND if self.split or kind is not Kind.W))
        kind, stage = table.kind[taken], table.stage[taken]
        is_second = np.append(False, table.slot[1:] == table.slot[:-1])[taken]  # of a pair
        is_separate = (kind == Kind.W.number) & ((self.fused_seconds[stage] >= 0) | self.can_pair)
        flags = np.where(is_separate, SEPARATE, 0) | np.where(is_second & self.can_pair, PAIRED, 0)
        is_fused = (kind == Kind.B.number) & self.split  # it becomes I and W
        order = np.repeat((3 * stage + _TOKENS[kind]) | flags, 1 + is_fused)
        weights = np.flatnonzero(is_fused) + np.cumsum(is_fused)[is_fused]
        order[weights] = 3 * stage[is_fused] + WEIGHT_GRAD
        return order

    def variants(self, order: Ints) -> list[Ints]:
        """The order, also with other adjacent steps joined.

        With all adjacent I and W joined where B is shorter, and with none; the same with F and I as pairs.
        """
        found = [order]
        if (self.fused_seconds >= 0).any():
            joined = order & TOKEN
            can_join = (joined % 3 == WEIGHT_GRAD) & (self.fused_seconds[joined // 3] >= 0)
            found += [joined, np.where(can_join, joined | SEPARATE, joined)]
        return [*found, *(pair_variants(order, self.arrays.rank_bounds) if self.can_pair else ())]

    def schedule_of(self, order: Ints, name: str) -> tuple[Schedule, float]:
        """The schedule of an order and its objective; I and W become one B elsewhere too, if as short."""
        schedule = self.fused_schedule(order, name)
        value = self._simulated(schedule)
        if self.split:
            # no rank waits for the input gradient of a stage that none feeds
            for more in (self.stage_graph.sources, range(self.placement.num_stages)):
                fused = self.fused_schedule(order, name, frozenset(more))
                if fused.num_steps == schedule.num_steps:
                    continue
                if (fused_value := self._simulated(fused)) <= value * (1 + 1e-12):
                    schedule, value = fused, fused_value
        return schedule, value

    def _simulated(self, schedule: Schedule) -> float:
        """The objective; an order that fits and that the kernel ran is not validated again."""
        simulator = Simulator(schedule, self.costs)
        timeline = simulator.timeline(simulator.finished_run(), with_period=self.objective == "period")
        return timeline.length(self.objective)

    def fused_schedule(self, order: Ints, name: str, more: AbstractSet[int] = frozenset()) -> Schedule:
        """The schedule of an order; on the stages `more`, every I directly followed by a W becomes one B."""
        token, microbatch, is_joined = number_entries(self.arrays, order, more)
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W)
        kind = np.array([kind.number for kind in kinds])[token % 3]
        is_fused = is_joined & (kind == Kind.W.number)
        kind[np.flatnonzero(is_fused) - 1] = Kind.B.number
        code = token // 3 << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | kind << KIND_SHIFT
        code |= np.where(is_joined, JOINED, 0)
        rows = [code[first:last][~is_fused[first:last]] for first, last in pairwise(self.arrays.rank_bounds)]
        return Schedule.from_codes(rows, self.placement, self.microbatches, name, self.graph)

    @property
    def objective_index(self) -> int:
        """The number of the objective in the kernel."""
        return OBJECTIVES.index(self.objective)

    def value(self, order: Ints) -> float:
        """The objective; infinite if the order deadlocks."""
        return float(kernel.evaluate(self.arrays, order, empty_state(self.arrays), self.objective_index)[0])

    def start_times(self, order: Ints) -> Floats:
        """When each step of an order starts."""
        state = empty_state(self.arrays)
        kernel.evaluate(self.arrays, order, state, MAKESPAN)
        return state.starts

    def fits(self, order: Ints) -> bool:
        """Whether every rank's list is in a valid order and within the memory limit."""
        return all(kernel.fits(self.arrays, order, rank) for rank in range(self.placement.num_ranks))
