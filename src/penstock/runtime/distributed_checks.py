"""The checks of `penstock doctor --distributed`: the processes of a launch meet and measure their links.

Every process runs them; rank 0 gets the result. A check that would hang is made before the processes connect.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import penstock
from penstock.arguments import plural
from penstock.cost.costs import Costs
from penstock.diagnostics import Check
from penstock.families import build
from penstock.ir.schedule import Schedule
from penstock.runtime.address_checks import check_addresses
from penstock.runtime.execution.channel_ends import channels_between_ranks
from penstock.runtime.execution.clocks import compare_clocks
from penstock.runtime.execution.link_measurement import LinkCosts, link_costs, measure_links
from penstock.runtime.transport.bounded import call_within
from penstock.runtime.transport.communicator import Communicator
from penstock.runtime.transport.stores import first_line

__all__ = ["DistributedReport", "check_launch", "distributed_checks"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAR_CLOCK_SECONDS = 0.1
_LATE_SECONDS = 5.0
_SLOW = 4  # times worse than the median of the edges


@dataclass(frozen=True)
class DistributedReport:
    """The result on rank 0; on the other ranks only the verdict is known."""

    checks: tuple[Check, ...]
    costs: Costs | None = None
    """The measured links, by edge of the schedule."""


def check_launch() -> Check:
    """Whether the environment is that of a launcher, and its address can be reached from all nodes."""
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        command = "torchrun --nproc-per-node 2 -m penstock doctor --distributed"
        return Check("launch", "fail", f"{', '.join(missing)} not set: run it under a launcher, e.g. {command}")
    world, address = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "0")) or -(-world // local)
    if nodes > 1 and _is_loopback(address):
        return Check(
            "launch",
            "fail",
            f"MASTER_ADDR is {address}, but there are {nodes} nodes: each node would wait for itself; give "
            "torchrun --rdzv-endpoint (or --master-addr) a host name that all nodes resolve",
        )
    wanted = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or nodes)
    shown = f"{plural(world, 'process')} on {plural(nodes, 'node')}, which meet at {address}"
    if wanted > nodes:
        advice = "torchrun --nnodes, and one --rdzv-endpoint for all of them"
        return Check("launch", "warn", f"{shown}, but the SLURM job has {wanted} nodes: give {advice}")
    return Check("launch", "ok", f"{shown}:{os.environ['MASTER_PORT']}")


def _is_loopback(address: str) -> bool:
    if address.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def distributed_checks(schedule: Schedule | None, seconds: float) -> DistributedReport:
    """Run all checks on this rank; the processes wait for each other for at most so many seconds."""
    checks = [check_launch()]
    if checks[0].verdict == "fail":
        return DistributedReport(tuple(checks))
    device = _device()
    begin = time.monotonic()
    try:
        limit = timedelta(seconds=seconds)
        store, rank, size = next(rendezvous("env://", timeout=limit))
        if device.type == "cpu":
            checks.append(check_addresses(store, rank, size, limit))
            if checks[-1].verdict == "fail":
                return DistributedReport(tuple(checks))
        backend = "nccl" if device.type == "cuda" else "gloo"
        call_within(
            seconds + _LATE_SECONDS,  # gloo takes several times its timeout
            lambda: dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size),
        )
        hosts = _gathered(socket.gethostname())
    except (RuntimeError, ValueError, TimeoutError) as error:
        text = f"the processes did not meet within {seconds:g} s: {first_line(error)}"
        return DistributedReport((*checks, Check("rendezvous", "fail", text)))
    try:
        elapsed = f"{plural(len(hosts), 'process')} met in {time.monotonic() - begin:.1f} s"
        checks += [Check("rendezvous", "ok", elapsed), _versions(), _world_size(schedule)]
        if any(check.verdict == "fail" for check in checks):
            return DistributedReport(tuple(checks))
        return _measured(checks, schedule, device, hosts, limit)
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _gathered(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _versions() -> Check:
    """Whether all ranks have the same versions, as pipelines require."""
    own = f"penstock {penstock.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    found = _gathered(own)
    if len(set(found)) == 1:
        return Check("versions", "ok", f"{own} on all ranks")
    by_text = {text: [rank for rank, each in enumerate(found) if each == text] for text in dict.fromkeys(found)}
    shown = "; ".join(f"ranks {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
    return Check("versions", "fail", shown)


def _world_size(schedule: Schedule | None) -> Check:
    world = dist.get_world_size()
    if schedule is None:
        return Check("world size", "ok", f"{world}; give --schedule to compare it with the ranks of a schedule")
    replicas, rest = divmod(world, schedule.num_ranks)
    if rest or not replicas:
        needed = plural(schedule.num_ranks, "rank")
        text = f"{plural(world, 'process')}, but {schedule.name} has {needed}"
        advice = f"start {plural(schedule.num_ranks, 'process')}, or a multiple of that"
        return Check("world size", "fail", f"{text}: {advice}")
    shown = f"{world}: " + (
        "one pipeline" if replicas == 1 else f"{replicas} pipelines, side by side in a mesh"
    )
    return Check("world size", "ok", f"{shown} of {plural(schedule.num_ranks, 'rank')}")


def _measured(
    checks: Sequence[Check],
    given: Schedule | None,
    device: torch.device,
    hosts: Sequence[str],
    limit: timedelta,
) -> DistributedReport:
    """Connect the ranks of each pipeline as a pipeline does, and measure clocks and links."""
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule = given or build("gpipe", ranks=world, microbatches=1)
    replicas = world // schedule.num_ranks
    members = list(range(rank % replicas, world, replicas))
    links = _links(schedule, members, rank // replicas, device, limit)
    measured: list[LinkCosts] = [LinkCosts(*each) for each in _gathered(tuple(links))][:replicas]
    names = _edge_names(schedule, replicas, hosts)
    results = [*checks, _clocks(rank, world, limit), *_link_checks(measured, names)]
    worst = LinkCosts(
        tuple(map(max, zip(*(each.latency for each in measured)))),
        tuple(_slowest(speeds) for speeds in zip(*(each.bandwidth for each in measured))),
    )
    return DistributedReport(tuple(results), link_costs(worst))


def _links(
    schedule: Schedule, members: Sequence[int], rank: int, device: torch.device, limit: timedelta
) -> LinkCosts:
    if len(members) == 1:
        return measure_links(None, schedule, rank)
    channels = channels_between_ranks(schedule)
    communicator = Communicator(members, rank, channels, schedule.microbatches, device, limit)
    try:
        return measure_links(communicator, schedule, rank)
    finally:
        communicator.close()


def _clocks(rank: int, world: int, limit: timedelta) -> Check:
    """How far the clocks of the ranks are apart: those that logs show."""
    if world == 1:
        return _clock_check([0.0])
    communicator = Communicator(range(world), rank, [], 1, torch.device("cpu"), limit)
    try:
        ahead = compare_clocks(communicator, rank, world).offsets  # of clocks that start at the boot of a host
    finally:
        communicator.close()
    starts = _gathered(time.time() - time.perf_counter())
    return _clock_check([start - starts[0] + offset for start, offset in zip(starts, ahead)])


def _slowest(speeds: Sequence[float | None]) -> float | None:
    return min((speed for speed in speeds if speed is not None), default=None)


def _clock_check(offsets: Sequence[float]) -> Check:
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    shown = f"at most {abs(offsets[rank]) * 1e3:.3g} ms apart (rank {rank} and rank 0)"
    if abs(offsets[rank]) > _FAR_CLOCK_SECONDS:
        return Check("clocks", "warn", f"{shown}: times in logs cannot be compared; use NTP on all nodes")
    return Check("clocks", "ok", shown)


def _edge_names(schedule: Schedule, replicas: int, hosts: Sequence[str]) -> list[Callable[[int], str]]:
    """Per edge: its name in the pipeline with this number."""

    def name(source: int, target: int) -> Callable[[int], str]:
        def of(replica: int) -> str:
            ranks = [schedule.placement.stage_to_rank[stage] * replicas + replica for stage in (source, target)]
            here, there = (hosts[rank] for rank in ranks)
            where = f"on {here}" if here == there else f"{here} to {there}"
            return f"rank {ranks[0]} to {ranks[1]}, {where}"

        return of

    return [name(*edge) for edge in schedule.graph.edges]


def _link_checks(measured: Sequence[LinkCosts], names: Sequence[Callable[[int], str]]) -> list[Check]:
    """One check for each edge between ranks of each pipeline."""
    found = [
        (f"edge {edge}", names[edge](replica), latency, speed)
        for replica, each in enumerate(measured)
        for edge, (latency, speed) in enumerate(zip(each.latency, each.bandwidth))
        if speed is not None
    ]
    if not found:
        return []
    usual = median(latency for _, _, latency, _ in found), median(speed for *_, speed in found)
    checks = []
    for edge, name, latency, speed in found:
        slow = latency > _SLOW * usual[0] or speed < usual[1] / _SLOW
        shown = f"{name}: {latency * 1e6:.0f} us, {speed / 1e9:.2f} GB/s"
        advice = (
            f"; {_SLOW} times worse than the others: check the interface (NCCL_SOCKET_IFNAME)" if slow else ""
        )
        checks.append(Check(edge, "warn" if slow else "ok", shown + advice))
    return checks
