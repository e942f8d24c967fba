"""The connections of one pipeline: what messages travel on, made and warmed up before the first step.

    on a CPU   one gloo group for all ranks; every message has a tag of its own, so none waits behind another
    elsewhere  one NCCL communicator for every directed edge (a communicator is a queue), and the gloo group
               for what the host must know before the data is there

The groups are made directly on the job's store under a name that is used once, not registered with
torch.distributed: a registered group needs all ranks of the world to be made, and its name comes again.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PipelineError

__all__ = ["DATA", "EDGE_DATA", "FLAG", "HEADER", "Links"]

# what a tag is for: the message itself, the announcement of another layout, the data in it, a flag of its own
EDGE_DATA, HEADER, DATA, FLAG = range(4)
_LANES = 4
_CONTROL_TAG = 2**31 - 1024  # above every tag of a message
_used: dict[tuple[int, ...], str] = {}  # the last name under which these ranks met


class _Group(Protocol):
    """What we use of a group; torch's own types do not say."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor], options: Any = ...) -> dist.Work: ...
    def barrier(self) -> dist.Work: ...
    def abort(self) -> None: ...


class Links:
    """The groups, and messages of plain tensors on them. Peers are ranks of the pipeline, not of the world."""

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        channels: Sequence[tuple[int, int, int]],
        microbatches: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.device = device
        self.size = len(members)
        self._microbatches = microbatches
        self.one_group = one_group_is_enough(device)
        """Whether all messages go through the one group, and flags with the data."""
        self._edges: dict[int, _Group] = {}
        self._holders: dict[tuple[int, ...], _Group] = {}
        base = _world_store("meet")
        try:
            name = _meeting_name(base, tuple(members), rank, timeout)
            self._store = PrefixStore(name, base)
            self.watched_store: Store = PrefixStore(name, _world_store("watch"))
            """Where ranks tell each other what they do, over another connection."""
            gloo: Any = dist.ProcessGroupGloo
            self._group: _Group = gloo(PrefixStore("gloo", self._store), rank, len(members), timeout)
            if not self.one_group:
                self._connect_edges(rank, channels, timeout)
            self.barrier()
        except RuntimeError as error:
            raise PipelineError(
                f"rank {rank} of the pipeline could not connect with the others (world ranks "
                f"{', '.join(map(str, members))}) within {timeout.total_seconds():g} s: every rank must make "
                f"the pipeline, and none may have died ({str(error).splitlines()[0]})"
            ) from error
        finally:
            if rank == 0:
                base.delete_key(_meeting_key(members))

    def _connect_edges(self, rank: int, channels: Sequence[tuple[int, int, int]], timeout: timedelta) -> None:
        """A communicator per directed edge. All ranks take the edges in one order, so none waits in a cycle."""
        for number, source, target in channels:
            if rank not in (source, target):
                continue
            store = PrefixStore(f"edge/{number}", self._store)
            self._edges[number] = edge = edge_group(self.device, store, int(rank == target), timeout)
            token = torch.zeros(1, device=self.device)
            (edge.send([token], 1, 0) if rank == source else edge.recv([token], 0, 0)).wait()

    def connect_holders(self, rank: int, holders: Sequence[tuple[int, ...]], timeout: timedelta) -> None:
        """A group for each set of ranks that hold weights together, on which all ranks agree."""
        for ranks in holders:
            if rank in ranks:
                store = PrefixStore(f"holders/{'-'.join(map(str, ranks))}", self._store)
                place, size = ranks.index(rank), len(ranks)
                gloo: Any = dist.ProcessGroupGloo
                self._holders[ranks] = (
                    gloo(store, place, size, timeout)
                    if self.one_group
                    else edge_group(self.device, store, place, timeout, size)
                )
        if holders:
            self.barrier()  # a rank that hung up at once would break the connection under way on another

    def summed(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ranks that hold weights together, the same to the last bit on each of them."""
        self._holders[ranks].allreduce([tensor]).wait()
        return tensor

    def largest(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The largest over ranks that hold weights together."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._holders[ranks].allreduce([tensor], options).wait()
        return tensor

    def tag(self, channel: int, microbatch: int, lane: int) -> int:
        """One tag for each thing that can be under way; those of eval follow those of training."""
        return (channel * 2 * self._microbatches + microbatch) * _LANES + lane

    def send(self, tensor: Tensor, peer: int, channel: int, tag: int) -> dist.Work:
        """Data from this rank's device."""
        edge = self._edges.get(channel)
        return self._group.send([tensor], peer, tag) if edge is None else edge.send([tensor], 1, tag)

    def receive(self, tensor: Tensor, peer: int, channel: int, tag: int) -> dist.Work:
        """Data to this rank's device."""
        edge = self._edges.get(channel)
        return self._group.recv([tensor], peer, tag) if edge is None else edge.recv([tensor], 0, tag)

    def send_host(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Numbers from the host."""
        return self._group.send([tensor], peer, tag)

    def receive_host(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Numbers to the host."""
        return self._group.recv([tensor], peer, tag)

    def control_tag(self, purpose: int) -> int:
        """A tag, and one after it, for something that is not a message of the schedule."""
        return _CONTROL_TAG + 2 * purpose

    def all_gather(self, tensor: Tensor, ranks: int) -> list[Tensor]:
        """Every rank's tensor, all of the same shape."""
        found = [torch.empty_like(tensor) for _ in range(ranks)]
        self._group.allgather([found], [tensor]).wait()
        return found

    def agree(self, name: str, mine: str, rank: int, ranks: int, timeout: timedelta) -> list[str]:
        """What every rank says under this name, in the order of the ranks."""
        self._store.set(f"{name}/{rank}", mine)
        keys = [f"{name}/{other}" for other in range(ranks)]
        self._store.wait(keys, timeout)
        return [self._store.get(key).decode() for key in keys]

    def barrier(self) -> None:
        """Wait for all ranks of the pipeline."""
        self._group.barrier().wait()

    def close(self) -> None:
        """Hang up: whoever waits for this rank is woken up by that, at once.

        gloo closes its connections when the last reference to the group and to its pending messages is gone, so
        the caller must have dropped those messages. Communicators of devices are aborted.
        """
        for edge in self._edges.values():
            edge.abort()
        if not self.one_group:
            for group in self._holders.values():
                group.abort()
        self._edges.clear()
        self._holders.clear()
        del self._group


def one_group_is_enough(device: torch.device) -> bool:
    """Whether messages with different tags pass each other in a group, as they do in gloo."""
    return device.type == "cpu"


def edge_group(device: torch.device, store: Store, side: int, timeout: timedelta, size: int = 2) -> _Group:
    """A group for one directed edge, where side 0 sends and side 1 receives, or for some holders of weights."""
    if not (device.type == "cuda" and dist.is_nccl_available()):
        raise PipelineError(f"a pipeline runs on CPUs (gloo) and CUDA devices (NCCL), not on {device}")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout  # noqa: SLF001 -- it has no other name
    group: _Group = nccl(store, side, size, options)
    return group


_connections: dict[str, tuple[weakref.ref[Any], Store]] = {}


def _world_store(purpose: str) -> Store:
    """A connection of its own to the job's store, made once: one connection answers one question at a time."""
    world: Any = dist.group.WORLD
    made_for, store = _connections.get(purpose, (None, None))
    if made_for is None or store is None or made_for() is not world:
        store = world.get_group_store().clone()
        _connections[purpose] = weakref.ref(world), store
    return store


def _meeting_key(members: Sequence[int]) -> str:
    return "penstock/" + "-".join(map(str, members))


def _meeting_name(store: Store, members: tuple[int, ...], rank: int, timeout: timedelta) -> str:
    """A name under which these ranks have never met: the first of them makes it up, the others read it."""
    key = _meeting_key(members)
    if rank == 0:
        name = f"{key}/{uuid.uuid4().hex}"
        store.set(key, name)
    else:
        end = time.monotonic() + timeout.total_seconds()
        while True:
            store.wait([key], timeout)
            name = store.get(key).decode() if store.check([key]) else ""
            if name and name != _used.get(members):
                break
            if time.monotonic() > end:
                raise PipelineError(
                    f"rank 0 of the pipeline did not connect within {timeout.total_seconds():g} s"
                )
            time.sleep(0.01)
    _used[members] = name
    return name
