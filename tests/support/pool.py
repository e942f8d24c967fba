"""A pool of processes connected by gloo, started once and used for many cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.runtime import local_ranks
from penstock.runtime.local_ranks import Failure, LocalRanks

__all__ = ["Pool", "Pools", "WorkerError"]

# loaded once, and not by every process of every pool, which would take it longer than most tests
local_ranks._PRELOADED += [
    "hypothesis",
    "pytest",
    "tests.support.composition",
    "tests.support.faults",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
]

_RUNS = 40
"""Runs before the processes are restarted: the threads of every gloo group they created keep polling."""


class WorkerError(AssertionError):
    """A case raised on some ranks, or did not finish."""


class Pool:
    """`ranks` processes; `run` calls a function of a test module on all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # torch looks up the name of 127.0.0.1 at every connection, and a name server may not answer
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self._local = LocalRanks(ranks)
        self._runs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = 300, lost: tuple[int, ...] = ()
    ) -> list[Any]:
        """The results of `function(*args)` on every rank; `lost` are the ranks that are expected to die."""
        self._runs += 1
        if self._runs > _RUNS:
            self.stop()
        answers = self._local.results(function, *args, seconds=seconds, may_die=lost)
        failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failure)}
        if failures:
            self.stop()
            messages = (f"rank {rank}:\n{each.details or each.message}" for rank, each in failures.items())
            raise WorkerError("\n".join(messages))
        return answers

    def stop(self) -> None:
        """End all processes; the next run starts them again."""
        self._local.stop()
        self._runs = 0


Pools = Callable[[int], Pool]
"""Gives the pool of this number of ranks."""
