"""Where the time of a step over the simulated makespan goes, with stages that sleep.

    python -m benchmarks.overhead [schedule ...]

The stages are those of `benchmarks.runtime sleep`. Each row is the critical path of the median step, in percent
of the simulated makespan:

    stage       what a stage takes beyond its time without a pipeline: autograd around it
    action      the rest of F, B, I and W: Python around the module and autograd
    send        copy and post
    message     from the end of a send to the end of the wait for it on another rank
    post        receives are posted
    wait        waits for messages that are there, and checks of the other ranks' calls
    release     of the buffers of sends
    between     between two calls
    gc          garbage collections in any of these
    begin, end  before the first call of a step, and from the last call to the return on all ranks
    other path  sleeps that the simulated critical path has and this one has not
"""

from __future__ import annotations

import gc
import os
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

import penstock
from benchmarks import modules
from benchmarks.critical_path import PARTS, StepTimes, Timed, breakdown, seconds_by_call
from benchmarks.processes import on_ranks
from benchmarks.runtime import TORCH_SCHEDULES, costs_of, prepare_sleeps, schedule_of, stage_seconds
from penstock.ir.kinds import Kind
from penstock.runtime import Pipeline
from penstock.runtime.program.program import Call
from penstock.runtime.transport.eager import EagerMessages, host_bytes
from penstock.runtime.transport.network import store_connection
from penstock.runtime.transport.process_groups import gloo_group

RANKS, MICROBATCHES, DURATION, STEPS = 4, 8, 0.010, 9


class Recorder:
    """Records the calls, sleeps and garbage collections of a pipeline's steps on this rank."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._program: Any = pipeline._runner.connect().programs["step"]  # noqa: SLF001
        self._pipeline = pipeline
        self._calls: list[Timed] = []
        self._collections: list[tuple[float, float]] = []
        self._program._calls = tuple(map(self._timed, self._program._calls))  # noqa: SLF001

    def _timed(self, call: Call) -> Call:
        parts = self._program.steps[call.position].parts
        action = parts[0] if call.subject is None else call.subject
        kinds = tuple(part.kind for part in parts)

        def run() -> None:
            slept, begin = modules.Takes.total, time.perf_counter()
            call.run()
            self._calls.append(
                Timed(call.type, action, begin, time.perf_counter(), modules.Takes.total - slept, kinds)
            )

        return call._replace(run=run)

    def _on_collection(self, phase: str, _info: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collections.append((now, now))
        else:
            self._collections[-1] = self._collections[-1][0], now

    def step(self, *args: Any, **kwargs: Any) -> StepTimes:
        """Run one step."""
        self._calls, self._collections = [], []
        gc.callbacks.append(self._on_collection)
        dist.barrier()
        entered = time.perf_counter()
        self._pipeline.step(*args, **kwargs)
        left = time.perf_counter()
        gc.callbacks.remove(self._on_collection)
        return StepTimes(entered, self._calls, left, self._collections)


def recorded_steps(schedule: penstock.Schedule) -> list[list[StepTimes]]:
    """The times of all ranks for each of several steps."""
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    x, y = torch.zeros(MICROBATCHES, 4, requires_grad=True), torch.zeros(MICROBATCHES, 4)
    stages = [modules.Sleeping(DURATION) for _ in own]
    with Pipeline(stages, schedule, loss=nn.functional.mse_loss) as pipeline:
        recorder = Recorder(pipeline)
        times = [recorder.step(x, target=y) for _ in range(STEPS + 2)][2:]
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, times)
    return [[ranks[step] for ranks in gathered] for step in range(STEPS)]


def overheads(names: list[str], print_row: Callable[..., None]) -> None:
    """Print the breakdown of each schedule, and the median time of each kind of call."""
    prepare_sleeps()
    calls: dict[str, list[float]] = defaultdict(list)
    forward, backward = stage_seconds(DURATION)
    alone = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
    print_row("a stage's F, B beyond sleeps", (forward - DURATION) * 1e6, (backward - 2 * DURATION) * 1e6, "us")
    print_row("schedule", "over %", *PARTS[1:], "other path", width=11)
    for name in names:
        schedule = schedule_of(name, RANKS, MICROBATCHES)
        ideal = penstock.simulate(schedule, costs_of(DURATION, 2 * DURATION)).makespan
        steps = recorded_steps(schedule)
        found = [breakdown(ranks, schedule.placement.stage_to_rank, alone) for ranks in steps]
        median = sorted(found, key=lambda parts: sum(parts.values()))[STEPS // 2]
        seconds = [sum(median.values()) - ideal, *(median[part] for part in PARTS[1:]), median["sleep"] - ideal]
        print_row(name, *(100 * each / ideal for each in seconds), width=11)
        for kind, taken in (pair for ranks in steps for pair in seconds_by_call(ranks)):
            calls[kind].append(taken)
    print_row("median us of each call, without sleeps; of a message, from the end of its send to its use")
    for kind in sorted(calls):
        print_row(kind, statistics.median(calls[kind]) * 1e6, f"{len(calls[kind])} calls")


# --- floors ----------------------------------------------------------------------------------------


def floors(print_row: Callable[..., None]) -> None:
    """This machine without a pipeline: sleeps of 10 ms, and messages to a rank that waits for 10 ms."""
    prepare_sleeps()
    late = []
    for _ in range(50):
        begin = time.perf_counter()
        time.sleep(DURATION)
        late.append(time.perf_counter() - begin - DURATION)
    print_row("sleep ends late", statistics.median(late) * 1e6)
    print_row("message over a socket", _one_way(*_socket_ends()))
    stamp = torch.zeros(1, dtype=torch.float64)

    def send(now: float) -> None:
        stamp[0] = now
        dist.send(stamp, 1)

    def receive() -> float:
        dist.recv(stamp, 0)
        return float(stamp)

    def poll() -> float:
        stamp[0] = 0
        arrived, work = stamp.numpy(), dist.irecv(stamp, 0)
        while not arrived[0]:
            os.sched_yield()
        assert work is not None, "this rank is in the group"
        work.wait()
        return float(stamp)

    before = _other_threads()
    print_row("message over gloo", _one_way(send, receive))
    used, queued = (now - then for now, then in zip(_other_threads(), before))
    print_row("its CPU time in threads of gloo", used / 50 * 1e6)
    print_row("their time without a core", queued / 50 * 1e6)
    print_row("message over gloo, polled", _one_way(send, poll))
    _round_trips(print_row)


def _round_trips(print_row: Callable[..., None]) -> None:
    """There and back, eagerly and over gloo, one after the other."""
    rank, limit = dist.get_rank(), timedelta(seconds=60)
    store = store_connection("measure")
    eager = EagerMessages(PrefixStore("eager", store), rank, 2, "0" * 32, limit)
    group = gloo_group(PrefixStore("gloo", store), rank, 2, limit)
    for kibibytes in (1, 16, 64):
        sent, received = (torch.zeros(2**10 * kibibytes, dtype=torch.uint8) for _ in range(2))
        data, target = host_bytes(sent), host_bytes(received)
        taken: list[list[float]] = [[], []]
        for number in range(100):
            for way, times in enumerate(taken):
                begin = time.perf_counter()
                expected = group.recv([received], 1 - rank, 0) if way else eager.receive(target, 1 - rank, 0)
                if rank == number % 2:  # the other answers
                    expected.wait()
                work = group.send([sent], 1 - rank, 0) if way else eager.send(data, 1 - rank, 0)
                if rank != number % 2:
                    expected.wait()
                work.wait()
                times.append(time.perf_counter() - begin)
        medians = [statistics.median(times) * 1e6 for times in taken]
        print_row(f"{kibibytes} KiB and back: eager, gloo", *medians)
    eager.close()


def _one_way(send: Callable[[float], Any], receive: Callable[[], float]) -> float:
    """Median microseconds from before a send of rank 0 to after the receive of rank 1, on the same clock."""
    taken = torch.zeros(50, dtype=torch.float64)
    dist.barrier()
    for place in range(len(taken)):
        if dist.get_rank() == 0:
            time.sleep(DURATION)
            send(time.perf_counter())
        else:
            sent = receive()
            taken[place] = time.perf_counter() - sent
    dist.broadcast(taken, 1)
    return float(taken.median()) * 1e6


def _socket_ends() -> tuple[Callable[[float], Any], Callable[[], float]]:
    """A connection from rank 0 to rank 1, and the calls at its ends."""
    port = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
            dist.broadcast(port, 1)
            end = server.accept()[0]
    else:
        dist.broadcast(port, 1)
        end = socket.create_connection(("127.0.0.1", int(port)))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return lambda now: end.sendall(now.hex().ljust(32).encode()), lambda: float.fromhex(end.recv(32).decode())


def _other_threads() -> tuple[float, float]:
    """CPU seconds of the other threads of this process, and how long they were ready to run without a core."""
    used = queued = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            cpu, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
            used, queued = used + int(cpu), queued + int(waited)
    return used / 1e9, queued / 1e9


def main() -> None:
    print(f"floors (2 ranks)\n  {floors.__doc__} Medians in us.")
    on_ranks(2, floors)
    print(f"overhead ({RANKS} ranks)\n  Parts of the critical path in % of the simulated makespan.")
    on_ranks(RANKS, overheads, sys.argv[1:] or list(TORCH_SCHEDULES))


if __name__ == "__main__":
    main()
