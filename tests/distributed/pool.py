"""A pool of real processes joined by gloo: started once for each number of ranks, given many cases."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Pool", "WorkerError"]


class WorkerError(AssertionError):
    """A case raised on some ranks, or did not end."""


class Pool:
    """`ranks` processes; `run` calls a function of a test module on all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # torch asks for the name of 127.0.0.1 at every connection, and a name server may leave that unanswered
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "penstock.runtime"]
        )
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = 60, lost: tuple[int, ...] = ()
    ) -> list[Any]:
        """What `function(*args)` gives on every rank; `lost` are the ranks that are meant to die."""
        if not self._processes or not all(process.is_alive() for process in self._processes):
            self._restart()
        for to in self._pipes:
            to.send((function, args))
        answers: list[Any] = [None] * self.ranks
        missing: dict[int, Any] = dict(enumerate(self._pipes))
        end = time.monotonic() + seconds
        while missing and (left := end - time.monotonic()) > 0:
            for ready in wait(list(missing.values()), left):
                pipe: Any = ready
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, f"rank {rank} died") if rank not in lost else (True, None)
                del missing[rank]
        if missing:
            self.stop()
            raise WorkerError(f"rank {sorted(missing)} did not end within {seconds} s; answers: {answers}")
        if lost:
            self.stop()
        if faults := [text for ok, text in answers if not ok]:
            self.stop()
            raise WorkerError("\n".join(faults))
        return [answer for _, answer in answers]

    def _restart(self) -> None:
        self.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(rank, self.ranks, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _work(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """The life of a worker."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args = pipe.recv()
            try:
                answer = True, function(*args)
            except BaseException:  # noqa: BLE001 -- told to the test
                answer = False, f"rank {rank}:\n{traceback.format_exc()}"
            sys.stdout.flush()
            pipe.send(answer)
