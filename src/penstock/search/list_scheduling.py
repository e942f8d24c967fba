"""List scheduling: builds an order step by step in time, by priority rules and within the memory limit."""

# ruff: noqa: C901, PLR0912, PLR0915 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compilation import compiled
from penstock.ir.encoding import Floats, Ints
from penstock.search.kernel_arrays import INPUT_GRAD, WEIGHT_GRAD, ProblemArrays
from penstock.search.message_arrays import MessageArrays


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


@compiled
def _reserve(arrays: ProblemArrays, rule: Rule) -> Floats:
    """Per stage: the activations of the later stages of its rank, unless the rule is eager."""
    hosts, stages = arrays.rank_of_stage, arrays.stage_order
    reserve = np.zeros(len(hosts))
    if not rule.eager:
        for index in range(len(stages)):
            for later in stages[index + 1 :]:
                if hosts[later] == hosts[stages[index]]:
                    reserve[stages[index]] += arrays.memory_change[3 * later]
    return reserve


@compiled
def _ready(messages: MessageArrays, arrivals: Floats, token: int, number: int) -> float:
    """When all inputs of a token are there, negative if one is not known yet."""
    latest = 0.0
    for j in range(messages.input_bounds[token], messages.input_bounds[token + 1]):
        arrival = arrivals[messages.inputs[j], number]
        if arrival < 0:
            return -1.0
        latest = max(latest, arrival)
    return latest


@compiled
def list_schedule(arrays: ProblemArrays, caps: Ints, rule: Rule) -> Ints:
    """An order, empty if memory runs out; `caps` limits the microbatches in flight per stage.

    The rank that can start soonest takes the next step.
    """
    bounds, hosts = arrays.rank_bounds, arrays.rank_of_stage
    seconds, change = arrays.seconds, arrays.memory_change
    ranks, stages, m = len(bounds) - 1, len(hosts), arrays.microbatches
    done = np.zeros(3 * stages, np.int64)
    messages = arrays.messages
    arrivals = np.full((len(messages.producer), m), -1.0)
    channel_free = np.zeros(arrays.num_channels)
    clocks, live = np.zeros(ranks), np.zeros(ranks)
    positions, order = bounds[:-1].copy(), np.zeros(bounds[-1], np.int64)
    reserve = _reserve(arrays, rule)
    choices, starts = np.full(ranks, -1, np.int64), np.full(ranks, np.inf)
    is_stale = np.ones(ranks, np.bool_)
    for _ in range(len(order)):
        # the next step of every rank whose choice may have changed
        for rank in range(ranks):
            if not is_stale[rank]:
                continue
            is_stale[rank] = False
            best, start, priority, pending_weight = -1, np.inf, np.inf, -1
            for index in range(stages):
                stage = arrays.stage_order[stages - 1 - index if rule.deep_first else index]
                if hosts[stage] != rank:
                    continue
                token = 3 * stage
                number = done[token + INPUT_GRAD]
                if number < done[token]:
                    ready = _ready(messages, arrivals, token + INPUT_GRAD, number)
                    begin = max(clocks[rank], ready)
                    if ready >= 0 and begin < priority:
                        best, start, priority = token + INPUT_GRAD, begin, begin
                number = done[token]
                if number < m and number - done[token + INPUT_GRAD] < caps[stage]:
                    ready = _ready(messages, arrivals, token, number)
                    begin = max(clocks[rank], ready)
                    free = arrays.memory_limits[rank] - live[rank] - change[token] - reserve[stage]
                    if ready >= 0 and free >= 0 and begin + rule.lead < priority:
                        best, start, priority = token, begin, begin + rule.lead
                if (
                    arrays.kinds == 3
                    and done[token + WEIGHT_GRAD] < done[token + INPUT_GRAD]
                    and pending_weight < 0
                ):
                    pending_weight = token + WEIGHT_GRAD
            if pending_weight >= 0 and clocks[rank] + (1.0 - rule.patience) * seconds[pending_weight] <= start:
                best, start = pending_weight, clocks[rank]
            choices[rank], starts[rank] = best, start
        rank = -1
        for other in range(ranks):
            if choices[other] >= 0 and (rank < 0 or starts[other] < starts[rank]):
                rank = other
        if rank < 0:
            return np.zeros(0, np.int64)
        # take it
        token = choices[rank]
        order[positions[rank]] = token
        positions[rank] += 1
        clocks[rank] = starts[rank] + seconds[token]
        live[rank] += change[token]
        for j in range(messages.bounds[token], messages.bounds[token + 1]):
            leaves = clocks[rank]
            if arrays.has_queues and messages.seconds[j] > 0:
                leaves = max(leaves, channel_free[messages.channel[j]])
                channel_free[messages.channel[j]] = leaves + messages.seconds[j]
            arrivals[j, done[token]] = leaves + messages.lag[j]
            is_stale[messages.target[j]] = True
        done[token] += 1
        is_stale[rank] = True
    return order
