"""Overlapped pairs in a search: their seconds, and orders whose adjacent F and I become pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import action_seconds, pair_seconds, pairs_can_pay, stream_seconds
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.search.kernel_arrays import FORWARD, INPUT_GRAD, PAIRED, TOKEN, WEIGHT_GRAD


def pair_prices(costs: Costs, placement: Placement, *, split: bool) -> Floats | None:
    """Seconds of a pair by its forward's stage, its backward's stage, and whether that is I (0) or B (1).

    None if no pair of two stages of a rank takes less than its parts. A launch that a pair saves does not
    count: a pair is worth its code where something is hidden.
    """
    if not pairs_can_pay(costs):
        return None
    stages = placement.num_stages
    streams, alone = stream_seconds(costs, stages), action_seconds(costs, stages)
    first = streams.of(Kind.F.number, np.arange(stages)[:, None])
    kinds = (Kind.I if split else Kind.B, Kind.B)
    prices = np.stack(
        [pair_seconds(costs, first, streams.of(kind.number, np.arange(stages)[None, :])) for kind in kinds], -1
    )
    apart = np.stack([alone[Kind.F.number][:, None] + alone[kind.number][None, :] for kind in kinds], -1)
    hosts = np.array(placement.stage_to_rank)
    together = hosts[:, None] == hosts[None, :]
    if not (prices[together] < apart[together] * (1 - 1e-12)).any():
        return None
    return prices + float(costs.launch_overhead)


def pair_variants(order: Ints, rank_bounds: Ints) -> Iterator[Ints]:
    """The order without pairs; with every adjacent F and I as a pair; and with forwards advanced for it."""
    plain = order & ~PAIRED
    yield plain
    rows = [plain[first:last].tolist() for first, last in pairwise(rank_bounds.tolist())]
    for advance in (False, True):
        paired = [_paired(_advanced(row) if advance else row) for row in rows]
        yield np.array([entry for row in paired for entry in row], dtype=np.int64)


def _advanced(row: list[int]) -> list[int]:
    """With the F that follows a backward ahead of it: I W F becomes F I W."""
    found: list[int] = []
    overtaken = 0  # up to here, every backward has its F
    for entry in row:
        at = len(found)
        if (entry & TOKEN) % 3 == FORWARD:
            at -= bool(found) and (found[-1] & TOKEN) % 3 == WEIGHT_GRAD
            is_behind = at > overtaken and (found[at - 1] & TOKEN) % 3 == INPUT_GRAD
            at = at - 1 if is_behind else len(found)
            overtaken = at + 2 if is_behind else overtaken
        found.insert(at, entry)
    return found


def _paired(row: list[int]) -> list[int]:
    """With every I directly behind an F in a pair, unless it needs that F, and its W in the pair too."""
    done: dict[int, int] = {}
    found: list[int] = []
    for entry in row:
        token = entry & TOKEN
        last = found[-1] if found else -1
        if token % 3 == INPUT_GRAD and last >= 0 and (last & TOKEN) % 3 == FORWARD:
            needs_it = (last & TOKEN) == token - 1 and done[token - 1] == done.get(token, 0) + 1
            entry = token if needs_it else token | PAIRED  # noqa: PLW2901 -- the same entry with its flag
        elif token % 3 == WEIGHT_GRAD and last == token - 1 | PAIRED:
            entry = token  # noqa: PLW2901 -- the same entry without its flag
        done[token] = done.get(token, 0) + 1
        found.append(entry)
    return found
