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
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.memory import stage_bytes
from penstock.cost.prices import ALL_TO_ALL, action_seconds
from penstock.errors import BuildError, CostsError
from penstock.families.rank_order import keep_microbatches
from penstock.ir.encoding import Ints, codes_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from penstock.search.zbv_greedy_pass import Instance, Result


_KINDS = (Kind.F, Kind.I, Kind.W)
"""In the order of their numbers in a pass."""


def zbv_greedy(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> Schedule:
    """The schedule for stages of equal cost; `memory_limit` is in bytes of activations per rank.

    Without a limit each rank may hold 2p activations, the minimum. Fewer than p microbatches are scheduled as
    p, and the surplus is removed.
    """
    if ranks < 1 or microbatches < 1:
        raise BuildError(f"ranks and microbatches must be at least 1 (given {ranks} and {microbatches})")
    from penstock.search.zbv_greedy_pass import Rule, run_pass  # noqa: PLC0415 -- loads the compiler

    placement = Placement.v(ranks, 2)
    instance = _instance(placement, max(ranks, microbatches), costs, memory_limit)
    best: Result | None = None
    for eager_input, eager_forward in product((True, False), repeat=2):
        allowance, worst = np.zeros(ranks, dtype=np.float64), math.inf
        while True:
            found = run_pass(instance, Rule(allowance, eager_input, eager_forward))
            if best is None or found.worst < best.worst:
                best = found
            if found.worst >= worst:
                break
            allowance[:], worst = found.worst - found.idle, found.worst
    assert best is not None, "there are four rules"
    kept = [keep_microbatches(_codes(row), microbatches) for row in best.rows]
    return Schedule.from_codes(kept, placement, microbatches, "zbv-greedy")


def _codes(row: Ints) -> Ints:
    kind, stage, microbatch = row.T
    codes: Ints = np.choose(kind, [codes_of(each, stage, microbatch) for each in _KINDS])
    return codes


def _instance(placement: Placement, microbatches: int, costs: Costs, limit: float | None) -> Instance:
    names = (
        "forward",
        "backward_input",
        "backward_weight",
        "latency",
        "activation",
        "activation_freed_by_input",
        *ALL_TO_ALL,
    )
    given = {name: getattr(costs, name) for name in names}
    if uneven := [name for name, value in given.items() if isinstance(value, tuple)]:
        raise CostsError(f"{', '.join(uneven)}: zbv-greedy needs stages of equal cost")
    own, ranks = Costs(**given), placement.num_ranks
    least = 2 * ranks * given["activation"]
    if limit is not None and limit < least:
        raise BuildError(f"zbv-greedy needs memory for {2 * ranks} activations, {least} bytes (given {limit})")
    from penstock.search.zbv_greedy_pass import Instance  # noqa: PLC0415 -- as above

    numbers = [kind.number for kind in _KINDS]
    return Instance(
        microbatches,
        np.array(placement.stages_of_rank, dtype=np.int64),
        np.array(placement.stage_to_rank, dtype=np.int64),
        _sources(placement),
        action_seconds(own, 1)[numbers, 0].astype(np.float64),
        stage_bytes(own, 1, MemoryLine.ACTIVATIONS)[numbers, 0].astype(np.float64),
        float(given["latency"]),
        float(least if limit is None else limit),
    )


def _sources(placement: Placement) -> Ints:
    """By kind and stage: the stage of another rank that the input comes from, or -1."""
    found = np.full((len(_KINDS), placement.num_stages), -1, dtype=np.int64)
    hosts = placement.stage_to_rank
    for source, target in StageGraph.chain(placement.num_stages).edges:
        if hosts[source] != hosts[target]:
            found[0, target], found[1, source] = source, target
    return found
