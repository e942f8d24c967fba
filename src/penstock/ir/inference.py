"""Infer what a list of steps leaves out: the rank of each stage, and the number of microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.arguments import plural, some
from penstock.errors import ScheduleError
from penstock.ir.arrays import Bools, Ints, kinds_in, microbatches_in, stages_in
from penstock.ir.encoding import JOINED, decode
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement

__all__ = ["infer_microbatches", "infer_placement"]


def infer_placement(rows: Sequence[Ints]) -> Placement:
    """Put each stage on the rank with most of its actions; one without actions, beside the stage before it."""
    num_ranks, codes = len(rows), _joined(rows)
    if not len(codes):
        raise ScheduleError(
            "there are no actions: a schedule is a list of actions for each rank, such as 0F0 0B0"
        )
    stage = stages_in(codes)
    highest = _highest("stage", rows, stage, np.ones(len(codes), dtype=np.bool_))
    rank = np.repeat(np.arange(num_ranks), [len(row) for row in rows])
    pairs, votes = np.unique(stage * max(num_ranks, 1) + rank, return_counts=True)
    named, host = np.divmod(pairs, max(num_ranks, 1))
    order = np.lexsort((-host, votes, named))  # of each stage, the last has the most votes, and the lowest rank
    hosts = np.full(highest + 1, -1, dtype=np.int64)
    hosts[named[order]] = host[order]
    filled: list[int] = []
    for each in hosts.tolist():
        filled.append(each if each >= 0 else (filled or [0])[-1])
    if idle := sorted(set(range(num_ranks)) - set(filled)):
        raise ScheduleError(
            f"rank {some(idle, 4)}: no stage; every rank must have at least one. A stage is on the rank with "
            "most of its actions, the lowest of several; to see which are on a wrong rank, give the placement"
        )
    return Placement(tuple(filled))


def infer_microbatches(rows: Sequence[Ints]) -> int:
    """One more than the highest number."""
    codes = _joined(rows)
    numbered = np.array([kind.has_microbatch for kind in Kind])[kinds_in(codes)]
    return _highest("microbatch", rows, microbatches_in(codes), numbered) + 1


def _joined(rows: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *rows])


def _highest(what: str, rows: Sequence[Ints], number: Ints, named: Bools) -> int:
    """The highest number that is named, if there are enough actions to reach it without gaps."""
    parts = np.flatnonzero(named)
    if not parts.size:
        return 0
    part = int(parts[number[parts].argmax()])
    highest = int(number[part])
    if highest >= parts.size:
        rank = int(np.searchsorted(np.cumsum([len(row) for row in rows]), part, side="right"))
        (action,) = decode([int(_joined(rows)[part]) & ~JOINED])
        raise ScheduleError(
            f"rank {rank}: {action} names {what} {highest}, but {plural(parts.size, 'action')} cannot cover "
            f"{what} 0 to {highest}; {what} numbers have no gaps"
        )
    return highest
