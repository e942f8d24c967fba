"""Which few ranks give the best bound from all of their orders: one by one, then the best with one more.

A rank alone, with all others as delays, shows what its own memory costs in the warm-up, in the drain and in
each microbatch between. Two or three ranks show what they cost each other. Each set of ranks gets half of the
effort that is left at most, so that a set with too many states does not use all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from penstock.bounds.bound import Bound
from penstock.bounds.memory_bounds import busy_and_idle
from penstock.bounds.rank_chain import RankChain
from penstock.bounds.rank_orders import RankOrders
from penstock.bounds.workload import Workload

__all__ = ["RankBounds"]

_WIDTHS = (4, 32)
"""States with the same counts, in a first and in a second pass."""
_SHARE = 0.5
"""Of the effort that is left, for the next set of ranks."""


@dataclass(eq=False)
class RankBounds:
    """Bounds from all orders of a few ranks, with a memory limit."""

    work: Workload
    limit: float | None
    objective: str
    states: int = field(default=0, init=False)
    """How many states of orders there were so far."""

    @property
    def applies(self) -> bool:
        """Whether there is a memory limit, and a chain of stages without pairs and memory techniques."""
        work = self.work
        techniques = work.may_recompute or work.may_offload or any(work.recomputed) or any(work.offloaded)
        plain = work.trains and not work.paired and not techniques
        return self.limit is not None and plain and work.stage_graph.is_chain

    @cached_property
    def own_span(self) -> bool:
        """Whether each rank's own span counts: a period is at least a span and the optimizer step."""
        return self.objective != "makespan"

    def bounds(self, best: float, used: Callable[[int], float]) -> Iterator[Bound]:
        """A bound per set of ranks, none above `best`, the value of an order that is known.

        `used` tells the share of the effort that is used, for a number of states.
        """
        besides = self.work.costs.optimizer_step if self.objective == "period" else 0.0
        for width in _WIDTHS if self.applies else ():
            chosen: tuple[int, ...] = ()
            while len(chosen) < (1 if self.own_span else self.work.placement.num_ranks):
                found = []
                for ranks in self._larger(chosen):
                    if used(self.states) >= 1:
                        return
                    seconds = self._least(ranks, width, best - besides, used)
                    found.append((seconds, ranks))
                    yield Bound(seconds + besides, "few ranks", f"no order of {_names(ranks)} takes less")
                    if seconds >= best - besides:
                        return
                chosen = max(found)[1]

    def _larger(self, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The chosen ranks and another one; the one with most work and idle time first."""
        others = [rank for rank in self._ranks if rank not in chosen]
        return [tuple(sorted((*chosen, rank))) for rank in others]

    @cached_property
    def _ranks(self) -> list[int]:
        assert self.limit is not None
        seconds = [
            busy_and_idle(self.work, rank, self.limit, own_span=self.own_span)
            for rank in range(self.work.placement.num_ranks)
        ]
        return sorted(range(len(seconds)), key=lambda rank: -seconds[rank])

    def _least(self, ranks: tuple[int, ...], width: int, best: float, used: Callable[[int], float]) -> float:
        assert self.limit is not None
        before = used(self.states)
        until = before + _SHARE * (1 - before)

        def is_over(states: int) -> bool:
            self.states += states
            return used(self.states) >= until

        return RankOrders(RankChain(self.work, self.limit, ranks, self.own_span), width).least(best, is_over)


def _names(ranks: tuple[int, ...]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
