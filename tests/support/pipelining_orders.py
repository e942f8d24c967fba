"""Schedule objects and orders of `penstock.pipelining` without modules or processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.pipelining import schedules as ours_untyped

__all__ = ["NAMES", "action", "made", "order", "ours", "texts"]

ours: Any = ours_untyped
action = ours._Action.from_str

NAMES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def made(name: str, ranks: int, microbatches: int, stages_per_rank: int = 2, **options: Any) -> Any:
    """A schedule object of ours with stages that have no modules."""
    single = name in ("GPipe", "1F1B")
    about = {
        "num_stages": ranks * (1 if single else stages_per_rank),
        "group_size": ranks,
        "group_rank": 0,
        "submod": None,
    }
    stages = [SimpleNamespace(stage_index=nth * ranks, **about) for nth in range(stages_per_rank)]
    return ours.get_schedule_class(name)(stages[0] if single else stages, microbatches, **options)


def order(*rows: str) -> dict[int, list[Any]]:
    return {rank: [action(text) for text in row.split()] for rank, row in enumerate(rows)}


def texts(lists: Any) -> list[list[str]]:
    return [["" if each is None else str(each) for each in lists[rank]] for rank in sorted(lists)]
