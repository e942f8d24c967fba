"""V-Half and V-Min: V placement of two stages per rank with a half or a third of 1F1B's activation memory.

One microbatch makes four passes over the ranks: F of stage a down, F of stage b back up, I of b down, I of a
back up. A *building block* fixes how many slots each pass takes from rank to rank. It is repeated for every
microbatch, one period of 6 slots later (F, I and W of two stages), and idle slots are then removed:

    penstock show v-half -p 4 -m 4

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 0F2 0F3 ·   ·   ·   7F0 7I0 7F1 7W0 7I1 7W1 ·   7F2 7I2 0I0 7W2 0W0 7F3 7I3 0I1 7W3 0W1
    rank 1  ·   1F0 1F1 1F2 1F3 ·   6F0 ·   6F1 6I0 6W0 ·   6I1 6F2 6W1 1I0 1W0 6I2 6F3 6W2 1I1 6I3 1W1 6W3
    rank 2  ·   ·   2F0 2F1 2F2 5F0 2F3 5F1 ·   ·   5I0 5W0 5F2 5I1 2I0 5W1 2W0 5F3 5I2 2I1 5W2 2W1 5I3 2I2
    rank 3  ·   ·   ·   3F0 4F0 3F1 4F1 3F2 4F2 ·   ·   4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4W1 4I2 3I2 3W1 4I3

    time    24  25
    rank 0  ·   0I2 0W2 0I3 0W3
    rank 1  1I2 1W2 1I3 1W3 ·
    rank 2  5W3 2I3 2W2 2W3 ·
    rank 3  3I3 4W2 3W2 4W3 3W3

Legend: p ranks, r this rank, a = stage r, b = stage 2p - 1 - r, m microbatches.

    memory    2((p + 2) div 2) live activations of half-rank stages    V-Half, about half of 1F1B's 2p
              2((p + 4) div 3)                                         V-Min, about a third
    idle      at F = I = W = 1 and c = 0, for m >= max(p, 3), on the rank that idles most:
              3p - 7 for even p >= 4, 3p - 4 for odd p >= 3            V-Half, about half of 1F1B's 6(p - 1)
              4p - 7, 4p - 5, 4p - 9 for p mod 3 = 0, 1, 2, p >= 3     V-Min, about two thirds

V-Min has no slack for unequal costs or slow hops: they make every period longer, for any m.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from penstock.families.registry import register
from penstock.ir.action import Kind
from penstock.ir.encoding import code_of
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["v_half", "v_min"]

_PERIOD = 6


class _Block(NamedTuple):
    step: tuple[int, int, int, int]
    """Slots from rank to rank: F of a, F of b, I of b, I of a."""
    turn: tuple[int, int, int]
    """Slots from one pass to the next, on the rank where it turns."""


_V_HALF = _Block(step=(2, 1, 2, 1), turn=(1, 2, 1))
_V_MIN = _Block(step=(1, 1, 1, 1), turn=(1, 3, 1))


@register(
    "v-half", "V placement with split backward: half the memory and half the bubble of 1F1B", stages_per_rank=2
)
def v_half(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Two slots per hop on the way down, one on the way up."""
    orders = _Compaction(ranks, microbatches, _V_HALF, limit=2 * ((ranks + 2) // 2)).run()
    return Schedule.from_codes(orders, Placement.v(ranks, stages_per_rank), microbatches, "v-half")


@register(
    "v-min",
    "V placement with split backward: a third of the memory of 1F1B, for equal costs",
    stages_per_rank=2,
)
def v_min(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """One slot per hop on every pass: the shortest lifetime of activations."""
    orders = _Compaction(ranks, microbatches, _V_MIN, limit=2 * ((ranks + 4) // 3)).run()
    return Schedule.from_codes(orders, Placement.v(ranks, stages_per_rank), microbatches, "v-min")


def _slots(p: int, block: _Block) -> list[list[int]]:
    """Return per rank the slots of one microbatch's F of a, F of b, I of b, I of a.

    Each gets the first slot that is free on its rank in every period, not before the slot the block gives it
    and after the slot of the step before it. W gets the remaining slots.
    """
    slots: list[list[int]] = [[] for _ in range(p)]
    nominal, slot = 0, -1
    for i, (turn, step) in enumerate(zip((0, *block.turn), block.step)):
        for hop, rank in enumerate(reversed(range(p)) if i % 2 else range(p)):
            nominal += step if hop else turn
            slot = max(nominal, slot + 1)
            while any((slot - taken) % _PERIOD == 0 for taken in slots[rank]):
                slot += 1
            slots[rank].append(slot)
    return slots


class _Pass(NamedTuple):
    """F or I of one stage, for one microbatch."""

    slot: int
    is_forward: bool
    stage: int
    microbatch: int
    can_wait: bool
    """Whether a W may run first when memory is full: the pass has a spare slot at every hop."""


class _Compaction:
    """Remove idle slots from the repeated block; in each slot, a rank runs the first possible one of:

    1. a W, if memory is full and the next pass can wait: an F always, an I if its hops take two slots;
    2. the next pass in the order of the repeated block;
    3. a W;
    4. the first later pass that is ready and leaves enough memory for all passes it overtakes.

    It terminates: the block alone keeps the forwards without their I within the limit, and 4. preserves that,
    so a rank whose memory is full has a W to run; and of all remaining passes, the first in the repeated block
    is ready.
    """

    def __init__(self, p: int, m: int, block: _Block, limit: int) -> None:
        self.ranks, self.limit, self.last_stage = range(p), limit, 2 * p - 1
        self.pending: list[deque[_Pass]] = []
        for rank, slots in enumerate(_slots(p, block)):
            stages = (rank, self.last_stage - rank, self.last_stage - rank, rank)
            passes = [
                _Pass(slot + _PERIOD * k, i < 2, stage, k, can_wait=i < 2 or block.step[i] > 1)
                for i, (slot, stage) in enumerate(zip(slots, stages))
                for k in range(m)
            ]
            self.pending.append(deque(sorted(passes)))
        self.deferred: list[deque[int]] = [deque() for _ in self.ranks]  # W whose I is done
        self.live = [0] * p  # forwards whose I is not done
        self.done: set[tuple[bool, int, int]] = set()

    def run(self) -> list[list[int]]:
        """Return the order of every rank."""
        orders: list[list[int]] = [[] for _ in self.ranks]
        while any(self.pending) or any(self.deferred):
            # all ranks choose by what is done before this slot
            for rank, chosen in [(rank, self._choose(rank)) for rank in self.ranks]:
                if chosen is not None:
                    orders[rank].append(self._run_pass(rank, chosen))
                elif self.deferred[rank]:
                    orders[rank].append(self.deferred[rank].popleft())
        return orders

    def _choose(self, rank: int) -> int | None:
        """Return the index of the pending pass to run, or None for a W or an idle slot."""
        deferred, live = len(self.deferred[rank]), self.live[rank]
        peak = live
        for i, step in enumerate(self.pending[rank]):
            if deferred and (i > 0 or (step.can_wait and live + deferred >= self.limit)):
                return None
            if step.is_forward and peak >= self.limit:
                return None
            if self._is_ready(step):
                return i
            live += 1 if step.is_forward else -1
            peak = max(peak, live)
        return None

    def _is_ready(self, step: _Pass) -> bool:
        if step.is_forward:
            return step.stage == 0 or (True, step.stage - 1, step.microbatch) in self.done
        if step.stage == self.last_stage:
            return (True, step.stage, step.microbatch) in self.done
        return (False, step.stage + 1, step.microbatch) in self.done

    def _run_pass(self, rank: int, chosen: int) -> int:
        _, is_forward, stage, microbatch, _ = self.pending[rank][chosen]
        del self.pending[rank][chosen]
        self.done.add((is_forward, stage, microbatch))
        self.live[rank] += 1 if is_forward else -1
        if is_forward:
            return code_of(Kind.F, stage, microbatch)
        self.deferred[rank].append(code_of(Kind.W, stage, microbatch))
        return code_of(Kind.I, stage, microbatch)
