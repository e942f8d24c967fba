"""Build the order of one rank: alternating passes, deferred weight gradients, numbered microbatches, omission.

Codes are the integers of `penstock.ir.encoding.code_of`, one per action, in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.encoding import (
    JOINED,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Bools,
    Ints,
    code_of,
    kinds_in,
    microbatches_in,
    stages_in,
)
from penstock.ir.kinds import Kind


def alternate(first: Ints, second: Ints) -> Ints:
    """Take one of `first` and one of `second` in turn, until one of them ends."""
    turns = min(len(first), len(second))
    return np.stack((first[:turns], second[:turns]), axis=1).ravel()


def overlapped_pairs(forwards: Ints, backwards: Ints) -> Ints:
    """One overlapped pair after the other, until the forwards or the backwards end."""
    return alternate(forwards, backwards | JOINED)


def defer_weights(forwards: Ints, inputs: Ints, weights: Ints, delay: int) -> Ints:
    """Repeat F I, and F I W from the `delay`-th I on; the remaining W come last."""
    rounds = np.full((len(inputs) + delay, 3), -1, dtype=np.int64)
    rounds[: len(forwards), 0] = forwards
    rounds[: len(inputs), 1] = inputs
    rounds[delay : delay + len(weights), 2] = weights
    order = rounds.ravel()
    return order[order >= 0]


def number_microbatches(steps: Sequence[int]) -> Ints:
    """The order of these kinds and stages, given as codes of microbatch 0, for one microbatch after the other.

    F, and likewise I or B, is of the next microbatch of its stage; W of the one whose I was first.
    """
    codes = np.array(steps, dtype=np.int64)
    kind, stage = kinds_in(codes), stages_in(codes)
    microbatch = np.zeros(len(codes), dtype=np.int64)
    forward, split, weight, full = (kind == each.number for each in (Kind.F, Kind.I, Kind.W, Kind.B))
    for own in (stage == each for each in np.unique(stage).tolist()):
        for counted in (own & forward, own & (split | full)):
            microbatch[counted] = np.arange(np.count_nonzero(counted))
        weights = own & weight
        microbatch[weights] = microbatch[own & split][: np.count_nonzero(weights)]
    return codes + (microbatch << MICROBATCH_SHIFT)


def keep_microbatches(order: Sequence[int] | Ints, microbatches: int) -> Ints:
    """Drop microbatches from this number on; half of an overlapped pair can remain, as a single step."""
    codes = np.asarray(order, dtype=np.int64)
    return _keep(codes, microbatches_in(codes) < microbatches)


def keep_stages(order: Ints, stages: Sequence[int]) -> Ints:
    """Drop all other stages, and number these from 0; half of an overlapped pair can remain."""
    stage = stages_in(order)
    number = np.searchsorted(stages, stage)
    keep = np.isin(stage, stages)
    return _keep(order - ((stage - number) << STAGE_SHIFT), keep)


def _keep(codes: Ints, keep: Bools) -> Ints:
    """Drop actions; what remains of an overlapped pair is a single step."""
    if keep.all():
        return codes
    single = (codes & JOINED == 1) & ~np.concatenate(([True], keep[:-1]))
    return np.where(single, codes - JOINED, codes)[keep]


def of_stage(stage: int) -> tuple[int, int, int, int]:
    """F, I, W and B of a stage, as steps for `number_microbatches`."""
    f, i, w, b = (code_of(kind, stage) for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
    return f, i, w, b
