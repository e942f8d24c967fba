"""The ranks that train the same stages on other data, and the collectives that they run in a step.

A stage may be replicated in three ways, and a rank may mix them:

    fully_shard, replicate   FSDP2 holds a shard of each parameter; see `FsdpShards`
    DistributedDataParallel  its own reductions are disabled, and the pipeline reduces the whole stage
    `replicas=` of Pipeline  the same for modules without a wrapper

Gradients are averaged over the replicas once per step, at REDUCE_GRAD.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.checksums import checksum, require_equal_replicas
from penstock.runtime.data_parallel.ddp import DdpWrappers
from penstock.runtime.data_parallel.fsdp import FsdpShards
from penstock.runtime.data_parallel.gradient_buckets import GradientBucket
from penstock.runtime.data_parallel.replica_layout import (
    data_parallel_groups,
    find_layout,
    unsharded,
)
from penstock.runtime.transport.process_groups import Group, process_group
from penstock.runtime.transport.transport_errors import transport_errors, wait

__all__ = ["ReplicaGroup"]


class ReplicaGroup:
    """The replicas of one rank's stages."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        shards: Mapping[int, FsdpShards],
        replicas: Group,
        schedule: Schedule,
        rank: int,
    ) -> None:
        self.shards = shards
        """The FSDP shards by stage."""
        self._modules = modules
        self._replicas = process_group(replicas, "replicas=", "dp")
        self._reduction_order = _reduction_order(schedule, rank)
        self._ddp = DdpWrappers(modules)
        self._pending: list[tuple[GradientBucket, Tensor, dist.Work]] = []
        self._unfinished: list[dist.Work] = []
        """The reductions that the last failed step had begun."""
        self._reduced: set[int] = set()
        """The stages whose reduction has begun in this step."""
        self.reduces = True
        """Whether this step reduces gradients; if not, a later step does."""
        self.unreduced = False
        """Whether there are gradients that no step has reduced yet."""
        self._are_equal = False
        """Whether the replicas were found to hold the same values."""
        self._find_layout()
        self.groups = data_parallel_groups(self._layout, shards, self._replicas)
        """The process groups over which the data is distributed, nested; empty without data parallelism."""
        self.count = math.prod(group.size() for group in self.groups)
        """The number of ranks that train the same stages."""

    def _find_layout(self) -> None:
        self._are_equal = False
        self._layout = find_layout(self._modules, self.shards, self._ddp, self._replicas, self._reduction_order)

    def refresh(self) -> None:
        """Before a step: reshard all parameters, and find replaced or unfrozen ones."""
        for shards in self.shards.values():
            shards.reshard()  # a forward outside of the pipeline may have left stale unsharded parameters
        if self.groups and unsharded(self._modules.values(), self.shards) != self._layout.parameters:
            self._find_layout()

    def begin(self, *, training: bool, reduces: bool) -> None:
        """Begin a step: compare the replicas if they have parameters that were not compared yet."""
        self.reduces = reduces
        self._reduced.clear()
        self._unfinished.clear()
        if training and not self._are_equal:  # eval needs no other replica
            require_equal_replicas(self._layout.replicated)
            self._are_equal = True

    def sample(self, step: int) -> tuple[tuple[int, ...], str, str] | None:
        """One of the parameters that replicas hold, another one in each step; None if there are none.

        The world ranks that hold it, its name, and its checksum, or that this step compares all parameters.
        """
        if not (replicated := self._layout.replicated):
            return None
        chosen = replicated[step % len(replicated)]
        value = f"checksum {int(checksum(chosen.parameter))}" if self._are_equal else "new or replaced"
        return tuple(dist.get_process_group_ranks(chosen.group)), chosen.name, value

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Only the actions of the schedule gather, reshard and reduce in here; DDP and FSDP do not."""
        with ExitStack() as entered:
            for shards in self.shards.values():
                entered.enter_context(shards.scheduled())
            entered.enter_context(self._ddp.no_sync())
            yield

    def has(self, kind: Kind, stage: int) -> bool:
        """Whether an action of this kind has anything to do for a stage."""
        return stage in self.shards or (kind is Kind.REDUCE_GRAD and stage in self._layout.buckets)

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: begin to average the gradients of a stage."""
        if not self.reduces or stage in self._reduced:
            return
        self._reduced.add(stage)
        if stage in self.shards:
            self.shards[stage].reduce()
        for bucket, group in self._layout.buckets.get(stage, ()):
            packed = bucket.pack().div_(group.size())  # before the sum, which may overflow
            work = dist.all_reduce(packed, group=group, async_op=True)
            assert work is not None
            self._pending.append((bucket, packed, work))

    def finish(self, *, trained: bool) -> None:
        """The end of a step: start the reductions that the schedule leaves out, and wait for all."""
        if trained and self.reduces:
            for stage in self._layout.buckets:
                self.reduce(stage)
        for shards in self.shards.values():
            shards.finish(reduces=trained and self.reduces)
        for bucket, packed, work in self._pending:
            wait(work)
            bucket.unpack(packed)
        self._pending.clear()
        if trained:
            self.unreduced = not self.reduces and self.count > 1

    def drop(self) -> None:
        """After a failed step: forget its pending reductions and its unreduced gradients."""
        self._unfinished = [work for _, _, work in self._pending]
        self._pending.clear()
        self.unreduced = False
        for shards in self.shards.values():
            shards.drop()

    @property
    def has_unfinished(self) -> bool:
        """Whether a reduction has begun that other replicas have not joined.

        If the step fails here, they would join it with the gradients of the next step.
        """
        works = [*self._unfinished, *(work for _, _, work in list(self._pending))]
        return not all(work.is_completed() for work in works)

    def total(self, values: Tensor, device: torch.device) -> Tensor:
        """The sum of these values over all replicas."""
        if not self.groups:
            return values
        moved = values.to(device)
        for group in self.groups:
            with transport_errors():
                dist.all_reduce(moved, group=group)
        return moved.to(values.device)


def _reduction_order(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank in the order of their REDUCE_GRAD; empty if there are none."""
    return [step.parts[0].stage for step in schedule.ranks[rank] if step.parts[0].kind is Kind.REDUCE_GRAD]
