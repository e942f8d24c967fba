"""A pool of real processes joined by gloo: started once for many cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.runtime.local_ranks import Failure, LocalRanks

__all__ = ["Pool", "Pools", "WorkerError"]


_RUNS = 10
"""Then processes are started anew: threads of every group of gloo that they made wake up again and again."""


class WorkerError(AssertionError):
    """A case raised on some ranks, or did not end."""


class Pool:
    """`ranks` processes; `run` calls a function of a test module on all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # torch asks for the name of 127.0.0.1 at every connection, and a name server may leave that unanswered
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self._local = LocalRanks(ranks)
        self._runs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = 300, lost: tuple[int, ...] = ()
    ) -> list[Any]:
        """What `function(*args)` gives on every rank; `lost` are the ranks that are meant to die."""
        self._runs += 1
        if self._runs > _RUNS:
            self.stop()
        answers = self._local.answers(function, *args, seconds=seconds, lost=lost)
        faults = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failure)}
        if faults:
            self.stop()
            told = (f"rank {rank}:\n{fault.details or fault.message}" for rank, fault in faults.items())
            raise WorkerError("\n".join(told))
        return answers

    def stop(self) -> None:
        """End all processes; the next run starts them again."""
        self._local.stop()
        self._runs = 0


Pools = Callable[[int], Pool]
"""The pool of so many ranks."""
