"""The checks of `penstock doctor` that need torch: of the installation, and of the processes of a launch."""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import penstock
from penstock.arguments import install_command, plural, some
from penstock.cost.costs import Costs
from penstock.diagnostics import Check
from penstock.families import build
from penstock.ir.encoding import Ints
from penstock.ir.schedule import Schedule
from penstock.runtime.program.channel_ends import channels_between_ranks
from penstock.runtime.session.profile import LARGE_BYTES, compare_clocks, link_costs, measure_links
from penstock.runtime.torch_internals.registry import VERIFIED, all_features, missing
from penstock.runtime.transport.communicator import Communicator
from penstock.runtime.transport.network import (
    address_of_interface,
    address_of_route,
    call_within,
    connect,
    first_line,
)

# --- the installation, in two processes ------------------------------------------------------------


def main() -> None:
    """Run one of the two processes; its arguments are its rank, the rendezvous port, and a timeout.

    It prints one line of JSON per check, so that the parent knows how far it came if it hangs.
    """
    for check in _installation_checks(*map(int, sys.argv[1:])):
        print(json.dumps(asdict(check)), flush=True)  # noqa: T201 -- for the parent process


def _installation_checks(rank: int, port: int, seconds: int) -> Iterator[Check]:
    yield _version(torch.__version__)
    yield _gloo()
    yield _gpus()
    yield _exchange(rank, port, seconds)
    if rank == 0:
        yield from internals_checks()


def _version(installed: str) -> Check:
    found, oldest = (tuple(int(part) for part in each.split(".")[:2]) for each in (installed, VERIFIED[0]))
    if found < oldest:
        return Check("torch", "fail", f"{installed}, older than {VERIFIED[0]}: {install_command('torch')}")
    tested = f"tested with {', '.join(VERIFIED)}"
    if ".".join(map(str, found)) in VERIFIED:
        return Check("torch", "ok", f"{installed} ({tested})")
    return Check("torch", "warn", f"{installed}; {tested}: private names may have changed: see internals")


def _gloo() -> Check:
    if dist.is_available() and dist.is_gloo_available():
        return Check("gloo", "ok", "in this build of torch")
    return Check("gloo", "fail", "not in this build of torch: install one that has torch.distributed")


def _gpus() -> Check:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            return Check("gpu", "ok", "none, and torch is built without GPU support: ranks run on CPUs")
        return Check("gpu", "warn", f"torch is built for {built} but finds no GPU: check the driver")
    if not dist.is_nccl_available():
        return Check("gpu", "fail", "there are GPUs, but NCCL is not in this build of torch")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Check("gpu", "warn", f"{found}, with NCCL; Penstock's path over NCCL is written but not tested")


def internals_checks() -> list[Check]:
    """Return the features whose private names of torch are all there, and a warning for each other feature."""
    lost = {feature: missing(feature.names) for feature in all_features()}
    present = ", ".join(feature.title for feature, names in lost.items() if not names)
    return [
        Check("internals", "ok", f"torch has the private names that these features need: {present}"),
        *(
            Check("internals", "warn", f"{each.title}: torch has no {', '.join(names)}; {each.without} works")
            for each, names in lost.items()
            if names
        ),
    ]


def _exchange(rank: int, port: int, seconds: int) -> Check:
    """Rank 0 sends three numbers, rank 1 sends them back doubled."""
    begin = time.monotonic()
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=limit, rank=rank, world_size=2)
    numbers = torch.arange(3.0)
    if rank == 0:
        dist.send(numbers, 1)
        dist.recv(numbers, 1)
    else:
        dist.recv(numbers, 0)
        dist.send(2 * numbers, 0)
    dist.destroy_process_group()
    elapsed = time.monotonic() - begin
    if rank == 0 and numbers.tolist() != [0.0, 2.0, 4.0]:
        return Check("exchange", "fail", f"two processes exchanged [0, 1, 2] and received {numbers.tolist()}")
    return Check("exchange", "ok", f"two processes connected and exchanged a tensor in {elapsed:.1f} s")


# --- addresses of a launch -------------------------------------------------------------------------
#
# gloo listens at the address of GLOO_SOCKET_IFNAME, or else at the address that the name of its host has on
# that host, which is often one of the loopback interface. The ranks compare these addresses through the job's
# store, because gloo itself waits for minutes. Then each tries to connect to the next host.


_CONNECT_SECONDS = 5.0


class _Place(NamedTuple):
    """Where a rank is reached, as it says itself."""

    host: str
    address: str
    port: int
    problem: str
    """Why gloo cannot listen there."""
    advice: str
    """What to set so that other hosts reach it."""


def check_addresses(job_store: Store, rank: int, size: int, limit: timedelta) -> Check:
    """Return the same check on all ranks, which all call it; raise if one of them does not within the limit."""
    store = PrefixStore("penstock/addresses", job_store)
    with socket.socket() as listener:
        own = _own_place(job_store, listener)
        places = [_Place(*json.loads(each)) for each in _exchanged(store, "place", rank, size, own, limit)]
        problem = _problem(places)
        if not problem:
            unreached = _exchanged(store, "unreached", rank, size, _unreached(places, rank), limit)
            problem = next(filter(None, map(json.loads, unreached)), "")
    if problem:
        store.set(f"end/{rank}", "")
        if rank == 0:  # which may host the store
            store.wait([f"end/{other}" for other in range(size)], limit)
        return Check("addresses", "fail", problem)
    hosts = {place.host: place.address for place in places}
    shown = some([f"{address} ({host})" for host, address in hosts.items()])
    return Check("addresses", "ok", f"gloo listens on {shown}")


def _exchanged(store: Store, name: str, rank: int, size: int, own: object, limit: timedelta) -> list[bytes]:
    """Return every rank's value, in JSON."""
    keys = [f"{name}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(own))
    store.wait(keys, limit)
    return [store.get(key) for key in keys]


def _own_place(store: Store, listener: socket.socket) -> _Place:
    """Listen where gloo will."""
    host, name = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = _interface_to(store)
    advice = f"set GLOO_SOCKET_IFNAME={interface}" if interface else "set GLOO_SOCKET_IFNAME"
    try:
        address = address_of_interface(name) if name else _address_of_name(host)
    except OSError:
        known = ", ".join(each for _, each in socket.if_nameindex())
        return _Place(host, "", 0, f"GLOO_SOCKET_IFNAME is {name}, but {host} has {known}", advice)
    listener.bind((address, 0))
    listener.listen(16)
    return _Place(host, address, listener.getsockname()[1], "", advice)


def _address_of_name(host: str) -> str:
    """Return the first address of the name at which a socket can listen, or else the loopback address."""
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM):
            with socket.socket() as probe, suppress(OSError):
                probe.bind((address[0], 0))
                return str(address[0])
    return "127.0.0.1"


def _interface_to(store: Store) -> str:
    """Return the interface from which this host reaches the store; empty if it is not known."""
    with suppress(OSError):
        address = address_of_route(store)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                if address_of_interface(name) == address and not ipaddress.ip_address(address).is_loopback:
                    return name
    return ""


def _problem(places: Sequence[_Place]) -> str:
    """Return what is wrong: an interface that does not exist, or an address that other hosts do not reach."""
    for place in places:
        if place.problem:
            return f"{place.problem}: {place.advice}"
    if len({place.host for place in places}) == 1:
        return ""
    local = {each.host: each for each in places if ipaddress.ip_address(each.address).is_loopback}
    if not local:
        return ""
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    why = f"GLOO_SOCKET_IFNAME is {given}" if given else "a host's own name resolves to it"
    shown = some([f"{each.address} on {host}" for host, each in local.items()])
    advice: dict[str, list[str]] = {}
    for host, each in local.items():
        advice.setdefault(each.advice, []).append(host)
    single = len(advice) == 1
    todo = "; ".join(what if single else f"on {some(hosts)} {what}" for what, hosts in advice.items())
    return f"gloo listens on {shown}, where other hosts do not reach it ({why}): {todo}"


def _unreached(places: Sequence[_Place], rank: int) -> str:
    """Return what to say if this rank does not reach the ranks of the next host."""
    hosts, own = list(dict.fromkeys(place.host for place in places)), places[rank].host
    following = hosts[(hosts.index(own) + 1) % len(hosts)]
    for other, place in enumerate(places):
        if place.host == following != own:
            try:
                connect(f"{place.address}:{place.port}", _CONNECT_SECONDS).close()
            except OSError as error:
                where = f"rank {other} at {place.address} on {place.host}"
                reason = error.strerror or f"no answer within {plural(f'{_CONNECT_SECONDS:g}', 'second')}"
                advice = "check the interface (GLOO_SOCKET_IFNAME) and the firewall"
                return f"rank {rank} on {own} does not reach {where} ({reason}): {advice}"
    return ""


# --- all checks of a launch: every process runs them, and rank 0 gets the result --------------------
#
# A check that would hang is made before the processes connect.


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
    """Check that the environment is from a launcher, and that all nodes can reach its address."""
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
    """Check that all ranks have the same versions, as pipelines require."""
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
        return Check("world size", "ok", f"{world}; there is no schedule to compare it with")
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
    """Measure the links of each pipeline, and the clocks of all ranks, which logs show."""
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule = given or build("gpipe", ranks=world, microbatches=1)
    replicas = world // schedule.num_ranks
    members = list(range(rank % replicas, world, replicas))
    with _connected(members, rank // replicas, schedule, device, limit) as communicator:
        measured: list[Ints] = _gathered(measure_links(communicator, schedule, rank // replicas))
    del measured[replicas:]
    with _connected(range(world), rank, None, torch.device("cpu"), limit) as communicator:
        ahead = compare_clocks(communicator, rank, world).offsets  # of clocks that start at the boot of a host
    starts = _gathered(time.time() - time.perf_counter())
    offsets = [start - starts[0] + offset for start, offset in zip(starts, ahead)]
    edges = [tuple(schedule.placement.stage_to_rank[stage] for stage in edge) for edge in schedule.graph.edges]

    def name(edge: int, replica: int) -> str:
        sender, receiver = (rank * replicas + replica for rank in edges[edge])
        here, there = hosts[sender], hosts[receiver]
        return f"rank {sender} to {receiver}, " + (f"on {here}" if here == there else f"{here} to {there}")

    results = [*checks, _clock_check(offsets), *_link_checks(measured, name)]
    return DistributedReport(tuple(results), link_costs(np.maximum.reduce(measured)))


@contextmanager
def _connected(
    members: Sequence[int], rank: int, schedule: Schedule | None, device: torch.device, limit: timedelta
) -> Iterator[Communicator | None]:
    """Connect these ranks, as a pipeline with this schedule does; a single rank has no communicator."""
    if len(members) == 1:
        yield None
        return
    channels = [] if schedule is None else channels_between_ranks(schedule)
    with closing(Communicator(members, rank, channels, 1, device, limit)) as communicator:
        yield communicator


def _clock_check(offsets: Sequence[float]) -> Check:
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    shown = f"at most {abs(offsets[rank]) * 1e3:.3g} ms apart (rank {rank} and rank 0)"
    if abs(offsets[rank]) > _FAR_CLOCK_SECONDS:
        return Check("clocks", "warn", f"{shown}: times in logs cannot be compared; use NTP on all nodes")
    return Check("clocks", "ok", shown)


def _link_checks(measured: Sequence[Ints], name: Callable[[int, int], str]) -> list[Check]:
    """Return one check for each edge between ranks of each pipeline; `name` is called with both numbers."""
    found = [
        (edge, name(edge, replica), latency, transfer)
        for replica, links in enumerate(measured)
        for edge, (latency, transfer) in enumerate(links.tolist())
        if transfer
    ]
    if not found:
        return []
    usual = median(latency for _, _, latency, _ in found), median(transfer for *_, transfer in found)
    checks = []
    for edge, where, latency, transfer in found:
        shown = f"{where}: {latency / 1e3:.0f} us, {LARGE_BYTES / transfer:.2f} GB/s"
        if slow := latency > _SLOW * usual[0] or transfer > _SLOW * usual[1]:
            shown += f"; {_SLOW} times worse than the others: check the interface (NCCL_SOCKET_IFNAME)"
        checks.append(Check(f"edge {edge}", "warn" if slow else "ok", shown))
    return checks


if __name__ == "__main__":
    main()
