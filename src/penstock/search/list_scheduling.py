"""Orders made step by step in the order of time, by rules of thumb that hold memory limits as they go."""

# ruff: noqa: C901, PLR0912, PLR0915 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.table import Ints
from penstock.search.kernel import F, G, Tables, W, compiled

__all__ = ["Rule", "make"]


class Rule(NamedTuple):
    """How a rank chooses among what it could do next."""

    patience: float
    """A W goes first if it makes the next F or G wait for at most this share of the W's length."""
    lead: float
    """Seconds that an F must be able to begin before a G, to go before it."""
    deep_first: bool
    """Whether of two stages that can both begin, the later one goes first."""
    eager: bool
    """Whether an F may use the room that deeper stages of the rank need to take a microbatch further."""


@compiled
def make(tables: Tables, caps: Ints, rule: Rule) -> Ints:
    """An order, or an empty one if memory runs out; `caps` limits, per stage, the microbatches on their way.

    Of the ranks, the one that can begin soonest goes on.
    """
    bounds, hosts, seconds, held = tables.bounds, tables.hosts, tables.seconds, tables.held
    ranks, stages, m = len(bounds) - 1, len(hosts), tables.microbatches
    done = np.zeros(3 * stages, np.int64)
    there = np.full((3 * stages, m), -1.0)
    free = np.zeros(tables.channels)
    clocks, holding = np.zeros(ranks), np.zeros(ranks)
    at = bounds[:-1].copy()
    rows = np.zeros(bounds[-1], np.int64)
    reserve = np.zeros(stages)
    if not rule.eager:
        for stage in range(stages):
            for deeper in range(stage + 1, stages):
                if hosts[deeper] == hosts[stage]:
                    reserve[stage] += held[3 * deeper]
    choice, begin_of = np.full(ranks, -1, np.int64), np.full(ranks, np.inf)
    stale = np.ones(ranks, np.bool_)
    left = bounds[-1]
    while left > 0:
        for rank in range(ranks):
            if not stale[rank]:
                continue
            stale[rank] = False
            best, when, rated, spare = -1, np.inf, np.inf, -1
            for index in range(stages):
                stage = stages - 1 - index if rule.deep_first else index
                if hosts[stage] != rank:
                    continue
                token = 3 * stage
                number = done[token + G]
                if number < done[token]:
                    ready = there[token + 3 + G, number] if stage < stages - 1 else 0.0
                    begin = max(clocks[rank], ready)
                    if ready >= 0 and begin < rated:
                        best, when, rated = token + G, begin, begin
                number = done[token]
                if number < m and number - done[token + G] < caps[stage]:
                    ready = there[token - 3, number] if stage > 0 else 0.0
                    begin = max(clocks[rank], ready)
                    room = tables.limits[rank] - holding[rank] - held[token] - reserve[stage]
                    if ready >= 0 and room >= 0 and begin + rule.lead < rated:
                        best, when, rated = token, begin, begin + rule.lead
                if tables.kinds == 3 and done[token + W] < done[token + G] and spare < 0:
                    spare = token + W
            if spare >= 0 and clocks[rank] + (1.0 - rule.patience) * seconds[spare] <= when:
                best, when = spare, clocks[rank]
            choice[rank], begin_of[rank] = best, when
        rank = -1
        for other in range(ranks):
            if choice[other] >= 0 and (rank < 0 or begin_of[other] < begin_of[rank]):
                rank = other
        if rank < 0:
            return np.zeros(0, np.int64)
        token = choice[rank]
        stage, kind = token // 3, token % 3
        end = begin_of[rank] + seconds[token]
        rows[at[rank]] = token
        at[rank] += 1
        clocks[rank] = end
        holding[rank] += held[token]
        leaves = end
        if tables.queues and tables.taken[token] > 0:
            leaves = max(leaves, free[tables.channel[token]])
            free[tables.channel[token]] = leaves + tables.taken[token]
        there[token, done[token]] = leaves + tables.lag[token]
        done[token] += 1
        left -= 1
        stale[rank] = True
        if kind == F and stage < stages - 1:
            stale[hosts[stage + 1]] = True
        elif kind == G and stage > 0:
            stale[hosts[stage - 1]] = True
    return rows
