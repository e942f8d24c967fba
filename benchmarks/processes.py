"""Run a measurement in several processes, of which rank 0 prints the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from penstock.processes import free_port


def on_ranks(ranks: int, measure: Callable[..., None], *args: Any) -> None:
    """Call `measure(*args, print_row)` in gloo processes with one thread each; only rank 0 prints."""
    start_processes(_process, (ranks, free_port(), measure, args), ranks, start_method="spawn")  # type: ignore[no-untyped-call]


def _process(rank: int, ranks: int, port: int, measure: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    measure(*args, print_row if rank == 0 else lambda *_, **__: None)
    dist.barrier()
    dist.destroy_process_group()


def print_row(*cells: Any, width: int = 16) -> None:
    """Print one row of a table, with numbers of this width."""
    print("  " + "  ".join(_cell(cell, width) for cell in cells), flush=True)


def _cell(cell: Any, width: int) -> str:
    return f"{cell:>{width}.3f}" if isinstance(cell, float) else f"{cell!s:>{width if width < 16 else 24}}"
