"""Techniques in words: which stages of a schedule are recomputed and offloaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.arguments import number_ranges
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule

TECHNIQUES = {"recompute": Kind.RECOMPUTE, "offload": Kind.OFFLOAD}


def class_of(schedule: Schedule) -> str:
    """`none`, `recompute`, `offload` or `both`."""
    used = [name for name, kind in TECHNIQUES.items() if schedule.table.has(kind)]
    return "both" if len(used) > 1 else used[0] if used else "none"


def technique_of(schedule: Schedule) -> str:
    """For example `recompute stages 0-2`, or `offload 13 of 64`, activations of a stage and microbatch."""
    texts = []
    for name, kind in TECHNIQUES.items():
        if not schedule.table.has(kind):
            continue
        counts = schedule.table.count_by_stage(kind)
        if set(counts.tolist()) <= {0, schedule.microbatches}:
            texts.append(f"{name} {_stages_text(np.flatnonzero(counts).tolist(), schedule.num_stages)}")
        else:
            texts.append(f"{name} {counts.sum()} of {schedule.num_stages * schedule.microbatches}")
    return " and ".join(texts)


def _stages_text(stages: Sequence[int], num_stages: int) -> str:
    if len(stages) == num_stages:
        return "all stages"
    ranges = number_ranges(stages, ",", most=num_stages)
    return f"stage{'s' * (len(stages) > 1)} {ranges}"
