"""Numbering: which microbatch each entry of an order has, and which entries are one step.

Orders have kinds and stages only (see `kernel_arrays`). F and I are numbered in ascending order. A W that is
one B with the I ahead of it has its number; the other W of a stage have those of its other I, in order:

    order         F F I W F I I W W
    microbatch    0 1 0 0 2 1 2 1 2        the first I and W are one B
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penstock.ir.encoding import Bools, Ints, stable_order
from penstock.search.kernel_arrays import FORWARD, INPUT_GRAD, PAIRED, TOKEN, WEIGHT_GRAD, ProblemArrays


class Numbered(NamedTuple):
    """Per entry of an order."""

    token: Ints
    microbatch: Ints
    is_joined: Bools
    """Whether it is one step with the entry ahead of it: a W that is B with its I, an I in a pair with an F."""


def number_entries(arrays: ProblemArrays, order: Ints, fused: Collection[int] = ()) -> Numbered:
    """The numbers of a whole order; on the stages `fused`, every I directly followed by a W is one B."""
    token = order & TOKEN
    stage, kind = token // 3, token % 3
    is_weight = kind == WEIGHT_GRAD
    previous = np.append(-1, token[:-1])
    previous[arrays.rank_bounds[:-1][np.diff(arrays.rank_bounds) > 0]] = -1
    follows_forward = (previous >= 0) & (previous % 3 == FORWARD)
    is_paired = (kind == INPUT_GRAD) & (order & PAIRED != 0) & follows_forward & arrays.can_pair
    pays = (arrays.fused_seconds >= 0)[stage] | np.append(False, is_paired[:-1])
    can_join = ((order == token) & pays) | np.isin(stage, list(fused))
    is_joined = is_weight & can_join & (previous == token - 1)
    microbatch = np.where(is_weight, 0, _occurrence(token, len(arrays.seconds)))
    joined = np.flatnonzero(is_joined)
    microbatch[joined] = microbatch[joined - 1]
    is_taken = np.append(is_joined[1:], False)  # an I whose W is the entry behind it
    made, used = (
        _by_stage(each, stage, len(arrays.rank_of_stage))
        for each in ((kind == INPUT_GRAD) & ~is_taken, is_weight & ~is_joined)
    )
    if arrays.kinds == 3:
        microbatch[used] = microbatch[made]
    return Numbered(token, microbatch, is_joined | is_paired)


def _by_stage(chosen: Bools, stage: Ints, stages: int) -> Ints:
    """The positions of the chosen entries, stage by stage, in the order of the list within each."""
    positions = np.flatnonzero(chosen)
    return positions[stable_order(stage[positions], stages)]


def _occurrence(token: Ints, tokens: int) -> Ints:
    """Per entry: how many entries ahead of it have the same token."""
    counts = np.bincount(token, minlength=tokens)
    by_token = stable_order(token, tokens)
    found = np.empty_like(token)
    found[by_token] = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found
