"""List scheduling: builds an order step by step in time, by priority rules and within the memory limit."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.search.compilation import compiled, inlined
from penstock.search.kernel_arrays import FORWARD, INPUT_GRAD, WEIGHT_GRAD, ProblemArrays

__all__ = ["Rule", "list_schedule"]


class Rule(NamedTuple):
    """How a rank chooses among the steps it can take next."""

    patience: float
    """A W goes first if it delays the next F or I by at most this share of the W's seconds."""
    lead: float
    """Seconds by which an F must be able to start before an I to go before it."""
    deep_first: bool
    """Whether of two stages that can start at the same time, the later one goes first."""
    eager: bool
    """Whether an F may use memory that later stages of the rank need to finish a microbatch."""


class _Progress(NamedTuple):
    """What is scheduled so far."""

    done: Ints
    """Per token."""
    arrivals: Floats
    channel_free: Floats
    clocks: Floats
    live: Floats
    """Per rank: bytes of activations."""
    reserve: Floats
    """Per stage: bytes that its F has to leave free."""


@inlined
def _earliest_start(arrivals: Floats, done: Ints, token: int, clock: float) -> float:
    """When the next step of a token can start, on a rank that is free at `clock`; negative if not yet known."""
    number = done[token]
    ready = 0.0
    if token % 3 == FORWARD:
        if token >= 3:
            ready = arrivals[token - 3, number]
    elif done[token - 1] <= number:
        return -1.0
    elif token % 3 == INPUT_GRAD and token + 3 < len(arrivals):
        ready = arrivals[token + 3, number]
    if ready < 0:
        return -1.0
    return float(max(clock, ready))


@inlined
def _message_arrival(arrays: ProblemArrays, channel_free: Floats, token: int, end: float) -> float:
    """When the message of a step that ends at `end` arrives; it occupies its channel from then on."""
    leaves = end
    if arrays.has_queues and arrays.channel_seconds[token] > 0:
        channel = arrays.channel[token]
        leaves = max(leaves, channel_free[channel])
        channel_free[channel] = leaves + arrays.channel_seconds[token]
    return float(leaves + arrays.lag[token])


@compiled
def _reserve(arrays: ProblemArrays, rule: Rule) -> Floats:
    """Per stage: the activations of the later stages of its rank, unless the rule is eager."""
    hosts = arrays.rank_of_stage
    reserve = np.zeros(len(hosts))
    if not rule.eager:
        for stage in range(len(hosts)):
            for later in range(stage + 1, len(hosts)):
                if hosts[later] == hosts[stage]:
                    reserve[stage] += arrays.memory_change[3 * later]
    return reserve


@compiled
def _choose(arrays: ProblemArrays, caps: Ints, rule: Rule, now: _Progress, rank: int) -> tuple[int, float]:
    """The token that a rank takes next, -1 if there is none yet, and when it starts."""
    stages, done = len(arrays.rank_of_stage), now.done
    best, start, priority, pending_weight = -1, np.inf, np.inf, -1
    for index in range(stages):
        stage = stages - 1 - index if rule.deep_first else index
        if arrays.rank_of_stage[stage] != rank:
            continue
        f, i, w = 3 * stage + FORWARD, 3 * stage + INPUT_GRAD, 3 * stage + WEIGHT_GRAD
        if done[i] < done[f]:
            begin = _earliest_start(now.arrivals, done, i, now.clocks[rank])
            if 0 <= begin < priority:
                best, start, priority = i, begin, begin
        if done[f] < arrays.microbatches and done[f] - done[i] < caps[stage]:
            begin = _earliest_start(now.arrivals, done, f, now.clocks[rank])
            free = arrays.memory_limits[rank] - now.live[rank] - arrays.memory_change[f] - now.reserve[stage]
            if begin >= 0 and free >= 0 and begin + rule.lead < priority:
                best, start, priority = f, begin, begin + rule.lead
        if arrays.kinds == 3 and done[w] < done[i] and pending_weight < 0:
            pending_weight = w
    if pending_weight >= 0:
        delay = (1.0 - rule.patience) * arrays.seconds[pending_weight]
        if now.clocks[rank] + delay <= start:
            return pending_weight, float(now.clocks[rank])
    return best, float(start)


@inlined
def _take(arrays: ProblemArrays, now: _Progress, rank: int, token: int, start: float) -> None:
    """Add a step of a rank."""
    end = start + arrays.seconds[token]
    now.clocks[rank] = end
    now.live[rank] += arrays.memory_change[token]
    now.arrivals[token, now.done[token]] = _message_arrival(arrays, now.channel_free, token, end)
    now.done[token] += 1


@compiled
def list_schedule(arrays: ProblemArrays, caps: Ints, rule: Rule) -> Ints:
    """An order, empty if memory runs out; `caps` limits the microbatches in flight per stage.

    The rank that can start soonest takes the next step.
    """
    hosts = arrays.rank_of_stage
    ranks, stages, tokens = len(arrays.rank_bounds) - 1, len(hosts), len(arrays.seconds)
    now = _Progress(
        np.zeros(tokens, np.int64),
        np.full((tokens, arrays.microbatches), -1.0),
        np.zeros(arrays.num_channels),
        np.zeros(ranks),
        np.zeros(ranks),
        _reserve(arrays, rule),
    )
    positions, order = arrays.rank_bounds[:-1].copy(), np.zeros(arrays.rank_bounds[-1], np.int64)
    choices, starts, is_stale = np.full(ranks, -1), np.full(ranks, np.inf), np.ones(ranks, np.bool_)
    for _ in range(len(order)):
        best = -1
        for rank in range(ranks):
            if is_stale[rank]:
                choices[rank], starts[rank] = _choose(arrays, caps, rule, now, rank)
                is_stale[rank] = False
            if choices[rank] >= 0 and (best < 0 or starts[rank] < starts[best]):
                best = rank
        if best < 0:
            return np.zeros(0, np.int64)
        token = choices[best]
        stage, kind = token // 3, token % 3
        _take(arrays, now, best, token, starts[best])
        order[positions[best]] = token
        positions[best] += 1
        is_stale[best] = True
        if kind == FORWARD and stage < stages - 1:
            is_stale[hosts[stage + 1]] = True
        elif kind == INPUT_GRAD and stage > 0:
            is_stale[hosts[stage - 1]] = True
    return order
