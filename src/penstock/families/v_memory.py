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

# ruff: noqa: ANN401 -- the loop runs over lists or arrays

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.families.registry import register
from penstock.ir.encoding import Ints, codes_of
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.loops import Loop

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
    orders = _compacted(ranks, microbatches, _V_HALF, limit=2 * ((ranks + 2) // 2))
    return Schedule.from_codes(orders, Placement.v(ranks, stages_per_rank), microbatches, "v-half")


@register(
    "v-min",
    "V placement with split backward: a third of the memory of 1F1B, for equal costs",
    stages_per_rank=2,
)
def v_min(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """One slot per hop on every pass: the shortest lifetime of activations."""
    orders = _compacted(ranks, microbatches, _V_MIN, limit=2 * ((ranks + 4) // 3))
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


def _compacted(p: int, m: int, block: _Block, limit: int) -> list[Ints]:
    """The order of every rank: the repeated block without its idle slots.

    In each slot, a rank runs the first possible one of:

    1. a W, if memory is full and the next pass can wait: an F always, an I if its hops take two slots;
    2. the next pass in the order of the repeated block;
    3. a W;
    4. the first later pass that is ready and leaves enough memory for all passes it overtakes.

    It terminates: the block alone keeps the forwards without their I within the limit, and 4. preserves that,
    so a rank whose memory is full has a W to run; and of all remaining passes, the first in the repeated block
    is ready.
    """
    slots, rank = np.array(_slots(p, block)), np.arange(p)[:, None, None]
    start = slots[:, :, None] + _PERIOD * np.arange(m)
    order = np.argsort(
        start.reshape(p, -1), axis=1
    )  # of the 4m passes of each rank, which have slots of their own
    number, microbatch = np.divmod(order, m)
    stage = np.where((number == 0) | (number == 3), rank[..., 0], 2 * p - 1 - rank[..., 0])
    can_wait = np.array([True, True, block.step[2] > 1, block.step[3] > 1])[number]
    # what a pass needs: cells are of F, then of I, by stage and microbatch
    cell = np.where(number < 2, stage, 2 * p + stage) * m + microbatch
    needed = np.where(number < 2, cell - m, np.where(stage == 2 * p - 1, stage * m + microbatch, cell + m))
    needed[(number < 2) & (stage == 0)] = -1
    inputs = [
        column.ravel() for column in (cell, needed, (number < 2).astype(np.int64), can_wait.astype(np.int64))
    ]
    sizes = np.array([p, m, limit])
    ran = np.empty(p * 6 * m, dtype=np.int64)  # cells of F, of I, and beyond 4pm of W
    state = (np.zeros(4 * p * m, dtype=np.int64), np.tile(np.arange(1, 4 * m + 1), p))
    ranks = np.zeros((6, p), dtype=np.int64)
    _COMPACT.run(p * m * 60, (sizes, *inputs), (ran, *state, *ranks))
    kind, cells = np.divmod(ran, 2 * p * m)
    codes = [codes_of(each, *np.divmod(cells, m)) for each in (Kind.F, Kind.I, Kind.W)]
    return list(np.choose(kind, codes).reshape(p, -1))


def _compact(  # noqa: C901, PLR0912 -- calls would take most of its time
    sizes: Any,
    cell: Any,
    needed: Any,
    is_forward: Any,
    can_wait: Any,
    ran: Any,
    done: Any,
    following: Any,
    first: Any,
    live: Any,
    count: Any,
    deferred: Any,
    chosen: Any,
    before: Any,
) -> None:
    """Fill in what each rank runs. Pending passes are a linked list; `deferred` counts W whose I is done."""
    p, m, limit = sizes[0], sizes[1], sizes[2]
    weights = 2 * p * m
    left = 6 * p * m
    while left > 0:
        for rank in range(p):  # all ranks choose by what is done before this slot
            chosen[rank] = before[rank] = -1
            held = peak = live[rank]
            full = limit - live[rank]
            i, previous = first[rank], -1
            while i < 4 * m:
                at = 4 * m * rank + i
                if deferred[rank] and (previous >= 0 or (can_wait[at] and deferred[rank] >= full)):
                    break
                if is_forward[at] and peak >= limit:
                    break
                if needed[at] < 0 or done[needed[at]]:
                    chosen[rank], before[rank] = i, previous
                    break
                held += 1 if is_forward[at] else -1
                peak = max(peak, held)
                previous, i = i, following[at]
        for rank in range(p):
            base = 6 * m * rank
            if chosen[rank] >= 0:
                at = 4 * m * rank + chosen[rank]
                if before[rank] >= 0:
                    following[4 * m * rank + before[rank]] = following[at]
                else:
                    first[rank] = following[at]
                done[cell[at]] = 1
                live[rank] += 1 if is_forward[at] else -1
                deferred[rank] += 0 if is_forward[at] else 1
                ran[base + count[rank]] = cell[at]
            elif deferred[rank]:
                ran[base + count[rank]] = -1
                deferred[rank] -= 1
            else:
                continue
            count[rank] += 1
            left -= 1
    for rank in range(p):  # W in the order of I
        base, i = 6 * m * rank, 6 * m * rank
        for j in range(base, base + 6 * m):
            if ran[j] < 0:
                while ran[i] < weights or ran[i] >= 2 * weights:
                    i += 1
                ran[j] = ran[i] + weights
                i += 1


_COMPACT = Loop(_compact)
