"""PO-H: half of the activations, those that live longest, wait on the host.

A rank works in rounds of F, I and W. A microbatch reaches the next local stage about p/2 rounds later, and
every stage gets a microbatch every v rounds, so that the rank holds about as much in every round:

    starts    stage c of a rank begins with its first microbatch in round c·h + c div (v / gcd(v, h)), where
              h = ceil(p/2); no two starts are equal modulo v, so a round has one F, and one I with its W
    backward  stages in reverse, from round (start of the last stage) + p - 1 - r on
    offload   all microbatches of the first half of a rank's stages, every second one of the middle stage of an
              odd number; but none that is used in the next round
    OFFLOAD   directly after F
    RELOAD    one round before I, so a copy of at most F + B + W seconds is hidden after the warm-up

Legend: p ranks, r this rank, v stages per rank, m microbatches; F, B, W the time of a stage's forward, input
gradient and weight gradient. Memory counts activations of a stage; those of the whole model for one microbatch
are M = p·v. Idle is the makespan minus the compute time of a rank.

    memory    about (v + 2)p/8 = (v + 2)M/8v, and at most 3 more than that rounded up where copies take no time:
              one that F has just taken, one that I and W use, one that is reloaded for the next I
    idle      less than the 3v(p - 1) of 1F1B at F = B = W

The memory is the mean over rounds. Stage c holds an activation for about p + 2h(v - 1 - c) rounds and takes one
every v rounds, so the stages of the second half hold (h(v/2)(v/2 - 1) + pv/2)/v; at h = p/2 that is (v + 2)p/8.
With odd v, half of the middle stage is more than that: (v + 1)²p/8v, 2p/3 instead of 5p/8 for v = 3.
"""

from __future__ import annotations

from math import gcd

from penstock.families.interleaved import half_the_ranks
from penstock.families.registry import register
from penstock.ir.encoding import code_of
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register("po-h", "half of the activations are offloaded to the host: about a quarter of the memory of 1F1B")
def po_h(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Offload the first half of the stages of each rank, in rounds of F, I and W."""
    placement = Placement.loop(ranks, stages_per_rank)
    starts = _starts(ranks, stages_per_rank)
    rows = [
        _order(stages, starts, ranks - 1 - rank, microbatches)
        for rank, stages in enumerate(placement.stages_of_rank)
    ]
    return Schedule.from_codes(rows, placement, microbatches, "po-h")


def _starts(ranks: int, stages_per_rank: int) -> list[int]:
    """Per local stage: the round of its first forward, on the first rank."""
    hop = half_the_ranks(ranks)
    distinct = stages_per_rank // gcd(stages_per_rank, hop)
    return [hop * c + c // distinct for c in range(stages_per_rank)]


def _order(stages: tuple[int, ...], starts: list[int], delay: int, microbatches: int) -> list[int]:
    """A rank's rounds, without those in which it has nothing to do."""
    v, first = len(stages), starts[-1] + delay
    work = {start + v * k: (c, k) for c, start in enumerate(starts) for k in range(microbatches)}

    def offloads(c: int, k: int) -> bool:
        rounds = first - starts[c] + starts[v - 1 - c]
        return rounds > 1 and (2 * c + 1 < v or (2 * c + 1 == v and k % 2 == 0))

    def backward(number: int) -> tuple[int, int] | None:
        return (v - 1 - work[number - first][0], work[number - first][1]) if number - first in work else None

    order: list[int] = []
    for number in range(max(work) + first + 1):
        forward, now, then = work.get(number), backward(number), backward(number + 1)
        if then is not None and offloads(*then):
            order.append(code_of(Kind.RELOAD, stages[then[0]], then[1]))
        if forward is not None:
            kinds = (Kind.F, Kind.OFFLOAD) if offloads(*forward) else (Kind.F,)
            order += [code_of(kind, stages[forward[0]], forward[1]) for kind in kinds]
        if now is not None:
            order += [code_of(kind, stages[now[0]], now[1]) for kind in (Kind.I, Kind.W)]
    return order
