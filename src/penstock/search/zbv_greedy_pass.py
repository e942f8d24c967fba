"""One pass of `penstock.search.zbv_greedy` over arrays: fill, level, rounds, drain."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Floats, Ints

F, I, W = 0, 1, 2


class Instance(NamedTuple):
    """The sizes and costs. Rank r has the stages a and b, `stages[r]`."""

    microbatches: int
    stages: Ints
    hosts: Ints
    """The rank of each stage."""
    sources: Ints
    """By kind and stage: the stage of another rank that the input comes from, or -1."""
    seconds: Floats
    """By kind."""
    memory: Floats
    """By kind: bytes that a step takes, or, if negative, frees."""
    hop: float
    limit: float


class Rule(NamedTuple):
    """When a W may delay a rank: if it would idle for longer than its allowance and than any rank so far."""

    allowance: Floats
    """By rank, in seconds."""
    eager_input: bool
    """Whether a W may delay I(b)."""
    eager_forward: bool
    """Whether a W may delay F."""


class Result(NamedTuple):
    """The steps of each rank in order, and its idle time since its first forward."""

    rows: Ints
    """By rank and position: kind, stage, microbatch."""
    idle: Floats
    worst: float


class _State(NamedTuple):
    ends: Floats
    """By kind, stage and microbatch."""
    counts: Ints
    """By kind and stage: the steps taken so far."""
    rows: Ints
    lengths: Ints
    clock: Floats
    held: Floats
    idle: Floats
    worst: Floats
    """The longest idle time of any rank, in an array of one."""
    deferred: Ints
    """By rank: the stages with a deferred W, in order; those from `first` to `last` are left."""
    first: Ints
    last: Ints


@compiled
def _arrival(instance: Instance, state: _State, kind: int, stage: int) -> float:
    """When the next input arrives: 0 if it comes from no other rank, -1 if it is not computed yet."""
    source = instance.sources[kind, stage]
    if source < 0:
        return 0.0
    microbatch = state.counts[kind, stage]
    if microbatch >= state.counts[kind, source]:
        return -1.0
    return float(state.ends[kind, source, microbatch] + instance.hop)


@compiled
def _take(instance: Instance, state: _State, kind: int, stage: int) -> None:
    r, microbatch = instance.hosts[stage], state.counts[kind, stage]
    start = max(state.clock[r], _arrival(instance, state, kind, stage))
    state.held[r] += instance.memory[kind]
    if state.lengths[r]:
        state.idle[r] += start - state.clock[r]
        state.worst[0] = max(state.worst[0], state.idle[r])
    state.clock[r] = start + instance.seconds[kind]
    state.ends[kind, stage, microbatch] = state.clock[r]
    state.counts[kind, stage] += 1
    row = state.rows[r, state.lengths[r]]
    row[0], row[1], row[2] = kind, stage, microbatch
    state.lengths[r] += 1
    if kind == I:
        state.deferred[r, state.last[r]] = stage
        state.last[r] += 1


@compiled
def _take_weight(instance: Instance, state: _State, r: int) -> None:
    stage = state.deferred[r, state.first[r]]
    state.first[r] += 1
    _take(instance, state, W, stage)


@compiled
def _take_filled(instance: Instance, state: _State, kind: int, stage: int, allowance: float) -> None:
    """Take a step, and before it W that release memory, fit into the wait, or limit the idle time."""
    r = instance.hosts[stage]
    while state.first[r] < state.last[r] and state.held[r] + instance.memory[kind] > instance.limit:
        _take_weight(instance, state, r)
    arrival = max(_arrival(instance, state, kind, stage), 0.0)
    while state.first[r] < state.last[r] and state.clock[r] + instance.seconds[W] <= arrival:
        _take_weight(instance, state, r)
    idle = state.idle[r] + arrival - state.clock[r]
    if state.first[r] < state.last[r] and idle > max(state.worst[0], allowance):
        _take_weight(instance, state, r)
    _take(instance, state, kind, stage)


@compiled
def _fill(instance: Instance, state: _State) -> None:
    f, size, ranks = instance.seconds[F], instance.memory[F], len(instance.stages)
    for r in range(ranks):
        _take(instance, state, F, instance.stages[r, 0])
    for r in range(ranks - 1, -1, -1):
        a, b = instance.stages[r]
        due = max(_arrival(instance, state, F, b), 0.0)
        while (
            state.clock[r] + f <= due
            and state.held[r] + (2 + 2 * r) * size <= instance.limit
            and state.counts[F, a] < instance.microbatches - r
        ):
            for above in range(r + 1):
                _take(instance, state, F, instance.stages[above, 0])
        _take(instance, state, F, b)


@compiled
def _level(instance: Instance, state: _State) -> None:
    turn = 0  # 0 for a, 1 for b; alternates across ranks
    ranks, done = len(instance.stages), state.counts[F]
    for r in range(1, ranks):
        a, b = instance.stages[r]
        above_a, above_b = done[instance.stages[r - 1, 0]], done[instance.stages[r - 1, 1]]
        while done[a] + done[b] < above_a + above_b or done[b] <= above_b < instance.microbatches:
            for other in range(ranks - 1, r - 1, -1):
                if done[instance.stages[other, turn]] < instance.microbatches:
                    _take(instance, state, F, instance.stages[other, turn])
            turn = 1 - turn


@compiled
def _goes_up(instance: Instance, state: _State, r: int) -> bool:
    """Whether this round's input gradient on rank r is I(a), not I(b)."""
    a, b = instance.stages[r]
    done_a, done_b = state.counts[I, a], state.counts[I, b]
    if done_a >= done_b:
        return False
    return bool(done_b == instance.microbatches or _arrival(instance, state, I, a) >= 0)


@compiled
def _next_forward(instance: Instance, state: _State, r: int) -> int:
    """The stage of this round's forward on rank r, or -1."""
    a, b = instance.stages[r]
    done_a, done_b = state.counts[F, a], state.counts[F, b]
    if done_b == instance.microbatches:
        return -1
    if done_b == done_a:
        return int(a)
    if _arrival(instance, state, F, b) >= 0:
        return int(b)
    if done_a < instance.microbatches and _arrival(instance, state, F, a) >= 0:
        return int(a)
    return -1


@compiled
def _rounds(instance: Instance, state: _State, rule: Rule) -> None:
    ranks, allowance = len(instance.stages), rule.allowance
    up = np.zeros(ranks, dtype=np.bool_)
    for _ in range(2 * instance.microbatches):
        for r in range(ranks):
            up[r] = _goes_up(instance, state, r)
        for r in range(ranks - 1, -1, -1):
            if up[r]:
                _take_filled(instance, state, I, instance.stages[r, 0], allowance[r])
        for r in range(ranks):
            if not up[r]:
                allowed = allowance[r] if rule.eager_input else np.inf
                _take_filled(instance, state, I, instance.stages[r, 1], allowed)
        for r in range(ranks):
            stage = _next_forward(instance, state, r)
            if stage >= 0:
                _take_filled(instance, state, F, stage, allowance[r] if rule.eager_forward else np.inf)


@compiled
def run_pass(instance: Instance, rule: Rule) -> Result:
    """One pass."""
    m, ranks, stages = instance.microbatches, len(instance.stages), len(instance.hosts)
    state = _State(
        np.zeros((3, stages, m)),
        np.zeros((3, stages), dtype=np.int64),
        np.zeros((ranks, 6 * m, 3), dtype=np.int64),
        np.zeros(ranks, dtype=np.int64),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(1),
        np.zeros((ranks, 2 * m), dtype=np.int64),
        np.zeros(ranks, dtype=np.int64),
        np.zeros(ranks, dtype=np.int64),
    )
    _fill(instance, state)
    _level(instance, state)
    _rounds(instance, state, rule)
    for r in range(ranks):
        while state.first[r] < state.last[r]:
            _take_weight(instance, state, r)
    return Result(state.rows, state.idle, state.worst[0])
