"""The process groups of one pipeline: how its ranks connect, and messages of tensors on them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from hashlib import sha256
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PipelineError
from penstock.runtime.torch_internals.distributed import new_nccl_group
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.eager import EAGER_BYTES, EagerMessages, host_bytes
from penstock.runtime.transport.network import StoreSilentError, call_within, first_line, store_connection
from penstock.runtime.transport.process_groups import abort_gloo_group, gloo_group, rank_name
from penstock.runtime.transport.transport_errors import Pending, TransportError, post, transport_errors, wait

MessageGroup: TypeAlias = Any
"""A process group of gloo or NCCL; torch does not annotate their methods."""


def single_group_suffices(device: torch.device) -> bool:
    """Return whether messages with different tags can overtake each other in one group, as in gloo."""
    return device.type == "cpu"


def device_group(
    device: torch.device, store: Store, rank: int, timeout: timedelta, size: int = 2
) -> MessageGroup:
    """Return a group for one directed edge, in which rank 0 sends and rank 1 receives, or for a subgroup."""
    if not (device.type == "cuda" and dist.is_nccl_available()):
        raise PipelineError(f"a pipeline runs on CPUs (gloo) and CUDA devices (NCCL), not on {device}")
    return new_nccl_group(store, rank, size, timeout)


T = TypeVar("T")

_STORE_SECONDS = 2.0  # that the store has to answer beyond the timeout
_POLL_SECONDS = 0.01
_last_name: dict[tuple[int, ...], str] = {}  # by the ranks that connected under it

# The process groups of one pipeline, connected before the first step.
#
#     on a CPU          one gloo group for all ranks, and TCP connections for short messages; every message has
#                       its own tag, so none waits behind another
#     on other devices  one NCCL communicator per directed edge (a communicator is a queue), and the same
#                       connections for what the host must know before the data arrives
#
# The groups are created directly on the job's store under a prefix that is used once. They are not registered
# with torch.distributed: creating a registered group needs all ranks of the world, and would reuse its name.


class Lane(IntEnum):
    """The parts of a message of the schedule, each with its own tag."""

    MESSAGE = 0
    SPEC = 1
    """A spec that the receiver does not expect."""
    DATA = 2
    """The data that follows such a spec."""
    FLAG = 3
    """The flag, where it is not inside the message."""


class ControlMessage(IntEnum):
    """Messages that are not part of the schedule."""

    LOSSES = 0
    CLOCK = 1
    PING = 2
    CALL = 3
    """What a rank is called to do, sent to its peers."""
    FINISHED = 4
    """That a rank has finished its part of a step."""
    EQUALITY = 5
    """The least and the greatest checksum of some ranks."""


_FIRST_CONTROL_TAG = 2**31 - 1024  # above every tag of the schedule's messages


class Communicator:
    """The process groups and messages of tensors on them. Peers are ranks of the pipeline, not of the world.

    `members` are world ranks; `check` is called while a rank waits for others to connect, and may raise.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        channels: Sequence[tuple[int, int, int]],
        microbatches: int,
        device: torch.device,
        timeout: timedelta,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.size = len(members)
        self._members, self._rank, self._timeout = tuple(members), rank, timeout
        self._check, self._microbatches = check, microbatches
        self.single_group = single_group_suffices(device)
        """Whether all messages use one group, with the flags inside the messages."""
        self._edges: dict[int, MessageGroup] = {}
        self._subgroups: dict[tuple[int, ...], MessageGroup] = {}
        self._gloo_groups: list[MessageGroup] = []
        self._eager: EagerMessages
        self.name = ""
        """The same on all ranks, once they have agreed on it, and never used before.

        It is the prefix of this connection's keys in the job's store, which may have those of earlier ones.
        """
        self._call(lambda: self._connect(channels))

    # --- connecting --------------------------------------------------------------------------------

    def _call(self, call: Callable[[], T]) -> T:
        """The result of a call that needs the store and the other ranks; if they fail, a `TransportError`."""

        def attempt() -> T:
            with transport_errors():
                return call()

        try:
            return call_within(self._timeout.total_seconds() + _STORE_SECONDS, attempt, self._check)
        except TimeoutError as error:
            raise StoreSilentError(error) from error
        except TransportError as error:
            if isinstance(error.__cause__, dist.DistNetworkError):  # groups raise other errors
                raise StoreSilentError(error) from error
            why = f"every rank must create the pipeline, and no process may have died ({first_line(error)})"
            raise TransportError(why + self._absent()) from error

    def _absent(self) -> str:
        """Return which ranks are missing, to be appended to an error."""

        def find() -> list[int]:
            present = self._store("present", "find absent ranks")  # a thread may wait on the other connection
            return [rank for rank in range(self.size) if not present.check([f"{rank}"])]

        try:
            absent = call_within(_STORE_SECONDS, find) if self.name else [0]  # which names it
        except (RuntimeError, TimeoutError):
            absent = []
        return "".join(f"; {rank_name(each, self._members[each])} has not connected" for each in absent)

    def _store(self, name: str, purpose: str = "connect") -> Store:
        """The part of the store with this name, on the connection for this purpose."""
        return PrefixStore(f"{self.name}/{name}", store_connection(purpose))

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Agree on the name: rank 0 generates and announces it, the others read it."""
        store, key = store_connection("connect"), "penstock/" + "-".join(map(str, self._members))
        if self._rank == 0:
            self.name = f"{key}/{uuid.uuid4().hex}"
            store.set(key, self.name)
        else:
            self.name = self._new_name(store, key)
        _last_name[self._members] = self.name
        self._store("present").set(f"{self._rank}", "")
        try:
            yield
        finally:  # the next connection must not read it
            if self._rank == 0 and store.check([key]) and store.get(key).decode() == self.name:
                store.delete_key(key)

    def _new_name(self, store: Store, key: str) -> str:
        last, end = _last_name.get(self._members), time.monotonic() + self._timeout.total_seconds()
        while True:
            store.wait([key], self._timeout)
            name = store.get(key).decode() if store.check([key]) else ""
            if name and name != last:
                return name
            if time.monotonic() > end:
                raise TransportError("rank 0 has not announced a new connection")
            time.sleep(_POLL_SECONDS)

    def _connect(self, channels: Sequence[tuple[int, int, int]]) -> None:
        with self._announced():
            self._group = self._gloo_group("gloo", self._rank, self.size)
            key = self.name.rsplit("/", 1)[-1]
            self._eager = EagerMessages(self._store("eager"), self._rank, self.size, key, self._timeout)
            try:
                if not self.single_group:
                    self._connect_edges(channels)
                self.barrier()
            except RuntimeError:
                self._eager.close()
                raise

    def _gloo_group(self, name: str, rank: int, size: int) -> MessageGroup:
        group = gloo_group(self._store(name), rank, size, self._timeout)
        self._gloo_groups.append(group)
        return group

    def _device_group(self, name: str, rank: int, size: int) -> MessageGroup:
        return device_group(self.device, self._store(name), rank, self._timeout, size)

    def _connect_edges(self, channels: Sequence[tuple[int, int, int]]) -> None:
        """One communicator per directed edge. All ranks connect them in one order, so there is no deadlock."""
        rank = self._rank
        for number, source, target in channels:
            if rank in (source, target):
                edge = self._edges[number] = self._device_group(f"edge/{number}", int(rank == target), 2)
                token = torch.zeros(1, device=self.device)
                wait(edge.send([token], 1, 0) if rank == source else edge.recv([token], 0, 0))

    def connect_subgroups(self, subgroups: Sequence[tuple[int, ...]]) -> None:
        """One group for each of these sets of ranks, the same list on all ranks."""
        rank, group = self._rank, self._gloo_group if self.single_group else self._device_group

        def connect() -> None:
            for ranks in subgroups:
                if rank in ranks:
                    name = f"subgroup/{'-'.join(map(str, ranks))}"
                    self._subgroups[ranks] = group(name, ranks.index(rank), len(ranks))
            if subgroups:
                self.barrier()  # a rank that closes at once would break connections that others still establish

        self._call(connect)

    def exchange_texts(self, own: str) -> list[str]:
        """Every rank's text."""
        return self._call(lambda: self._all_texts(own))

    def _all_texts(self, own: str) -> list[str]:
        data = np.frombuffer(own.encode(), dtype=np.uint8).astype(np.int64)
        lengths = [int(each) for each in self.all_gather(torch.tensor([len(data)]))]
        return [bytes(each.tolist()).decode() for each in gather_arrays(self, data, lengths)]

    # --- messages ----------------------------------------------------------------------------------

    def tag(self, channel: int, slot: int, lane: Lane) -> int:
        """One tag for each message that can be pending; the slots of eval follow those of training."""
        return (channel * 2 * self._microbatches + slot) * len(Lane) + lane

    def control_tag(self, purpose: ControlMessage) -> int:
        """The first of two tags for this control message."""
        return _FIRST_CONTROL_TAG + 2 * purpose

    def send(self, buffer: Buffer, peer: int, channel: int, tag: int) -> Pending:
        """Send the message in a buffer on this rank's device."""
        if (edge := self._edges.get(channel)) is not None:
            return post(edge.send, [buffer.message], 1, tag)
        if buffer.host_bytes is not None and buffer.nbytes <= EAGER_BYTES:
            return self._eager.send(buffer.host_bytes, peer, tag)
        return post(self._group.send, [buffer.message], peer, tag)

    def receive(self, buffer: Buffer, peer: int, channel: int, tag: int) -> Pending:
        """Receive a message into a buffer on this rank's device."""
        if (edge := self._edges.get(channel)) is not None:
            return post(edge.recv, [buffer.message], 0, tag)
        if buffer.host_bytes is not None and buffer.nbytes <= EAGER_BYTES:
            return self._eager.receive(buffer.host_bytes, peer, tag)
        return post(self._group.recv, [buffer.message], peer, tag)

    def send_host(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Send a tensor in host memory."""
        if tensor.nbytes <= EAGER_BYTES:
            return self._eager.send(host_bytes(tensor), peer, tag)
        return post(self._group.send, [tensor], peer, tag)

    def receive_host(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Receive a tensor in host memory, of the same length as it is sent."""
        if tensor.nbytes <= EAGER_BYTES:
            return self._eager.receive(host_bytes(tensor), peer, tag)
        return post(self._group.recv, [tensor], peer, tag)

    # --- collectives -------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of the same shape, in host memory."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with transport_errors():
            self._group.allgather([gathered], [tensor]).wait()
        return gathered

    def all_equal(self, tensor: Tensor) -> bool:
        """Whether all ranks have the same bytes, of tensors of one size in host memory.

        All ranks get the same answer, after as many messages as doublings of 1 until their number is reached.
        """
        number = int.from_bytes(sha256(tensor.numpy().tobytes()).digest()[:7], "big")
        least, most, distance = number, number, 1
        tag, rank = self.control_tag(ControlMessage.EQUALITY), self._rank
        while distance < self.size:
            own, other = torch.tensor([least, most]), torch.empty(2, dtype=torch.int64)
            received = self.receive_host(other, (rank - distance) % self.size, tag)
            sent = self.send_host(own, (rank + distance) % self.size, tag)
            wait(received)
            wait(sent)
            least, most = min(least, int(other[0])), max(most, int(other[1]))
            distance *= 2
        return least == most

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over a subgroup, in place; the result has the same bits on each of its ranks."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        with transport_errors():
            self._subgroups[ranks].allreduce([tensor], options).wait()
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks of the pipeline."""
        with transport_errors():
            self._group.barrier().wait()

    def abort(self) -> None:
        """End all connections and every wait on them, also on other ranks; any thread may call it."""
        self._eager.abort()
        for group in list(self._gloo_groups):
            abort_gloo_group(group)
        for edge in list(self._edges.values()):
            edge.abort()
        if not self.single_group:
            for group in list(self._subgroups.values()):
                group.abort()

    def close(self) -> None:
        """End and release all connections.

        gloo closes its sockets when the last reference to the group and to its pending messages is gone, so the
        caller releases those messages first.
        """
        self.abort()
        self._gloo_groups.clear()
        self._eager.close()
        self._edges.clear()
        self._subgroups.clear()
        del self._group


def gather_arrays(communicator: Communicator | None, own: Any, lengths: Sequence[int]) -> list[Any]:
    """Every rank's array of integers; `lengths` are those of the ranks' arrays."""
    if communicator is None:
        return [own]
    padded = torch.zeros((max(lengths, default=0), *own.shape[1:]), dtype=torch.int64)
    padded[: len(own)] = torch.from_numpy(np.ascontiguousarray(own))
    return [array[:length].numpy() for array, length in zip(communicator.all_gather(padded), lengths)]
