"""Ends a step on all ranks together: no rank returns from it before every rank has finished it.

    other ranks                          rank of the last sink
    actions finished   --- FINISHED -->  waits until every rank has finished
                                         waits for the last sinks of other pipelines of this model:
                                         sums the losses over replicas, meets tensor-parallel ranks
    return             <--- LOSSES ----  returns

The sinks are the stages that feed no other, in a chain the last stage. The losses of sinks on other ranks are
part of their FINISHED. So a failure on any rank fails the step on all of them, and all ranks agree on which
batches were trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.dtensors import whole
from penstock.runtime.program.program import StepAbortedError
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import Pending, TransportError, transport_errors, wait
from penstock.traces.rank_state import Wait, WaitKind


class LossExchange:
    """The exchange of each step on one rank; receives are posted before the step.

    `sinks` are those of this rank.
    """

    def __init__(
        self, communicator: Communicator | None, config: ExecutionConfig, sinks: Mapping[int, Stage]
    ) -> None:
        schedule = config.schedule
        self._communicator, self._config, self._sinks = communicator, config, sinks
        self._microbatches = schedule.microbatches
        ranks_of_sinks = [schedule.placement.stage_to_rank[sink] for sink in schedule.graph.sinks]
        self._source = ranks_of_sinks[-1]
        """The rank that adds up all losses and sends them."""
        self._is_source = config.rank == self._source
        self._others = [rank for rank in range(schedule.num_ranks) if rank != self._source]
        self._with_sinks = {rank for rank in ranks_of_sinks if rank != self._source}
        self._tensor_groups = _tensor_groups(config) if self._is_source else []
        self._message: Tensor
        self._finished: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._sent: list[Pending] = []
        self.awaited: Wait | None = None
        """What this rank waits for at the end of a step."""
        self.abort_requested = False
        """Set by another thread when the step has failed on another rank."""

    def begin(self) -> None:
        """Post the receives."""
        self._message = self._empty()
        self.awaited = None
        if (communicator := self._communicator) is None:
            return
        if self._is_source:
            self._finished = {rank: self._finished_message(rank) for rank in self._others}
            received = self._finished
        else:
            received = {self._source: self._message}
        self._pending = {rank: self._receive(communicator, message, rank) for rank, message in received.items()}

    def _empty(self) -> Tensor:
        """Whether there is a loss, the loss of the step, the losses of the microbatches."""
        return torch.zeros(2 + self._microbatches, dtype=torch.float64)

    def _finished_message(self, rank: int) -> Tensor:
        return self._empty() if rank in self._with_sinks else torch.zeros(1, dtype=torch.uint8)

    def finish(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        """The loss of the step over all replicas and of each microbatch, the same on every rank."""
        if not self._is_source:
            finished = self._finished_message(self._config.rank)
            self._add_own(finished, weights)
            self._send(finished, [self._source])
            self._wait_for(Wait(WaitKind.RECEIVE, "the losses", self._source))
        else:
            self._add_own(self._message, weights)
            for rank in list(self._pending):
                self._wait_for(Wait(WaitKind.COMMIT, "the end of the step", rank))
            self._add_others()
            self._wait_for_tensor_parallel_ranks()
            if self.abort_requested:
                raise StepAbortedError
            # from here on the step has succeeded; nobody waits for a rank that dies before it receives this
            with suppress(TransportError):
                self._send(self._message, self._others)
        if not self._message[0]:
            return None, None
        return float(self._message[1]), self._message[2:].clone()

    def _receive(self, communicator: Communicator, message: Tensor, rank: int) -> Pending:
        purpose = ControlMessage.LOSSES if rank == self._source else ControlMessage.FINISHED
        return communicator.receive_host(message, rank, communicator.control_tag(purpose))

    def _send(self, message: Tensor, ranks: Sequence[int]) -> None:
        """Send to these ranks; they have received what was sent in the last step, because they finished it."""
        if (communicator := self._communicator) is not None:
            purpose = ControlMessage.LOSSES if self._is_source else ControlMessage.FINISHED
            tag = communicator.control_tag(purpose)
            self._sent = [communicator.send_host(message, rank, tag) for rank in ranks]

    def _wait_for(self, awaited: Wait) -> None:
        self.awaited = awaited
        assert awaited.peer is not None, "it waits for one rank"
        wait(self._pending.pop(awaited.peer))
        self.awaited = None

    def _add_own(self, message: Tensor, weights: Sequence[float]) -> None:
        """Add the losses of this rank's sinks, and this replica's part of the loss of the step."""
        shares = torch.tensor(weights, dtype=torch.float64)
        counted = shares > 0  # the mean over no tokens is not a number, and its weight is 0
        for sink in self._sinks.values():
            if sink.losses:
                in_order = [whole(sink.losses[microbatch]) for microbatch in range(self._microbatches)]
                losses = torch.stack([loss.reshape(()).to(torch.float64) for loss in in_order]).cpu()
                message[0] = 1
                message[1] += (losses[counted] * shares[counted]).sum() / self._config.replication.count
                message[2:] += losses

    def _add_others(self) -> None:
        """Add the losses of other ranks' sinks, and the parts of other replicas."""
        message, replication = self._message, self._config.replication
        has_loss = {self._source: bool(message[0])}
        for rank in sorted(self._with_sinks):
            has_loss[rank] = bool(self._finished[rank][0])
            message += self._finished[rank]
        if len(set(has_loss.values())) > 1:
            given, missing = (
                listed(r for r, has in has_loss.items() if has is which) for which in (True, False)
            )
            raise PipelineError(
                f"rank {given} has a loss, but rank {missing} has none, and has a stage that feeds no other: "
                "give target= on the ranks of all such stages, or on none"
            )
        if message[0]:
            self.awaited = Wait(WaitKind.COLLECTIVE, "the losses of its replicas")
            message[1] = replication.total(message[1], self._config.device)
            self.awaited = None

    def _wait_for_tensor_parallel_ranks(self) -> None:
        """Wait until the pipelines of the tensor-parallel ranks have finished the step too."""
        if self._tensor_groups:
            self.awaited = Wait(WaitKind.COLLECTIVE, "the end of the step on its tensor-parallel ranks")
            token = torch.zeros(1, device=self._config.device)
            for group in self._tensor_groups:
                with transport_errors():
                    dist.all_reduce(token, group=group)
            token.cpu()  # on a device, the host has not waited yet
            self.awaited = None

    def abandon(self) -> None:
        """Release pending messages, which keep the connections open."""
        self._pending.clear()
        self._sent.clear()
        self._communicator = None


def _tensor_groups(config: ExecutionConfig) -> list[dist.ProcessGroup]:
    """The groups of the ranks that hold other parts of this rank's stages, besides its replicas and shards."""
    pipeline, known = set(config.members), config.replication.groups
    return [
        group
        for group in model_groups(config.trained.values(), ())
        if group not in known and len(pipeline & set(dist.get_process_group_ranks(group))) == 1
    ]
