"""Ranks on the hosts of `tests.support.hosts`, forked from the server of pools, which has loaded torch."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from penstock.processes import end_with_parent
from penstock.runtime.local_ranks import Failure, LocalRanks, serve_calls, start_fork_server
from tests.support.hosts import Host, Hosts
from tests.support.pool import WorkerError
from tests.support.slowness import slowness

__all__ = ["HostRanks", "join", "launch_environment"]

_ports = itertools.count(29600)


class HostRanks(LocalRanks):
    """So many ranks on each host. The functions that they run join a process group by `join`."""

    def __init__(self, hosts: Hosts, per_host: int, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(len(hosts.all) * per_host)
        self._per_host = per_host
        self._environment = {"GLOO_SOCKET_IFNAME": "eth0"} if environment is None else dict(environment)
        self.hosts = hosts

    def _start(self) -> None:
        if self._processes:
            return
        start_fork_server()
        port = next(_ports)
        for rank in range(self.count):
            own_end, child_end = self._context.Pipe()
            self._pipes.append(own_end)
            host = self.hosts.all[rank // self._per_host]
            environment = launch_environment(self.hosts, rank, self._per_host, port) | self._environment
            process = self._context.Process(target=_serve, args=(host, environment, child_end), daemon=True)
            self._processes.append(process)
            process.start()
            child_end.close()

    def __enter__(self) -> HostRanks:  # noqa: PYI034 -- Self needs Python 3.11
        return self

    def run(self, function: Callable[..., Any], *args: Any, lost: tuple[int, ...] = ()) -> list[Any]:
        """The results of `function(*args)` on every rank but those that are expected to die."""
        results = self.results(function, *args, seconds=60 * slowness(), may_die=lost)
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise WorkerError(f"rank {rank}:\n{result.details or result.message}")
        return [result for rank, result in enumerate(results) if rank not in lost]


def launch_environment(hosts: Hosts, rank: int, per_host: int, port: int) -> dict[str, str]:
    """What a launcher sets for this rank."""
    return {
        "MASTER_ADDR": hosts.all[0].address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts.all) * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
    }


def join(seconds: float = 120) -> None:
    """Create the world group of this process, unless there is one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def _serve(host: Host, environment: Mapping[str, str], pipe: Connection) -> None:
    """Enter the host, and run the functions that arrive through the pipe."""
    host.enter()  # before there are threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(1,), daemon=True).start()
    os.dup2(2, 1)
    torch.set_num_threads(1)
    gc.freeze()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(environment)
    serve_calls(pipe)
