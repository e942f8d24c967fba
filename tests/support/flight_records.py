"""Dumps of torch's flight recorder, as NCCL writes them: what the ranks of a schedule had issued."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.ir.schedule import Schedule

__all__ = ["dump_of", "operations_of", "write_dumps"]

SIZE = [2, 8]


def operations_of(schedule: Schedule, rank: int, steps: int = 1) -> list[tuple[str, int]]:
    """The sends and receives of a rank with their peers, step by step, in the order of its list."""
    hosts = schedule.placement.stage_to_rank
    one = [
        ("send" if part.kind.is_send else "recv", hosts[part.other_end])
        for row in schedule.ranks[rank]
        for part in row.parts
        if part.kind.is_communication
    ]
    return one * steps


def dump_of(
    rank: int,
    ranks: int,
    operations: Sequence[tuple[str, int]],
    pending: int = 0,
    *,
    first: int = 0,
    sizes: Mapping[int, list[int]] | None = None,
) -> dict[str, Any]:
    """A dump in version 2.10; the last `pending` operations are not completed, `sizes` are of odd ones."""
    entries = []
    for number, (kind, peer) in enumerate(operations):
        arrow = f"send {rank}->{peer}" if kind == "send" else f"recv {rank}<-{peer}"
        size = (sizes or {}).get(number, SIZE)
        is_pending = number >= len(operations) - pending
        first_pending = number == len(operations) - pending
        entries.append(
            {
                "record_id": first + number,
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "thread_name": "python",
                "thread_id": "140735",
                "collective_seq_id": 0,
                "p2p_seq_id": first + number + 1,
                "op_id": first + number + 1,
                "profiling_name": f"nccl:{arrow}",
                "time_created_ns": 1_700_000_000_000_000_000 + number,
                "input_sizes": [size],
                "input_dtypes": ["Float"],
                "output_sizes": [size],
                "output_dtypes": ["Float"],
                "state": "completed" if not is_pending else "started" if first_pending else "scheduled",
                "time_discovered_started_ns": 1 if not is_pending or first_pending else None,
                "time_discovered_completed_ns": None if is_pending else 2,
                "retired": not is_pending,
                "timeout_ms": 600_000,
                "is_p2p": True,
                "frames": [{"name": "isend", "filename": "distributed_c10d.py", "line": 2500}],
            }
        )
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {"0": group},
        "pg_status": {"0": {"last_enqueued_collective": -1, "last_completed_collective": -1}},
        "entries": entries,
    }


def write_dumps(folder: Path, dumps: Mapping[int, dict[str, Any]], *, as_json: bool = False) -> None:
    """Write each rank's dump as torch names it."""
    for rank, dump in dumps.items():
        content = json.dumps(dump).encode() if as_json else pickle.dumps(dump, protocol=2)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
