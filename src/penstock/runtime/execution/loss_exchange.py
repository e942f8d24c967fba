"""Ends a step on all ranks together: no rank returns from it before every rank has finished it.

    other ranks                          rank of the last stage
    actions finished   --- FINISHED -->  waits until every rank has finished
                                         waits for the last stages of other pipelines of this model:
                                         sums the losses over replicas, meets tensor-parallel ranks
    return             <--- LOSSES ----  returns

So a failure on any rank fails the step on all of them, and all ranks agree on which batches were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.dtensors import whole
from penstock.runtime.execution.config import ExecutionConfig
from penstock.runtime.execution.program import StepAbortedError
from penstock.runtime.execution.stage import Stage
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import TransportError, transport_errors, wait

__all__ = ["LossExchange"]


class LossExchange:
    """The exchange of each step on one rank; receives are posted before the step. `last` is the last stage."""

    def __init__(self, communicator: Communicator | None, config: ExecutionConfig, last: Stage | None) -> None:
        schedule = config.schedule
        self._communicator, self._config, self._last = communicator, config, last
        self._microbatches = schedule.microbatches
        self._source = schedule.placement.stage_to_rank[-1]
        self._others = [rank for rank in range(schedule.num_ranks) if rank != self._source]
        self._tensor_groups = _tensor_groups(config) if last is not None else []
        self._message: Tensor
        self._pending: dict[int, dist.Work] = {}
        self._sent: list[dist.Work] = []
        self.awaited = ""
        """What this rank waits for at the end of a step."""
        self.abort_requested = False
        """Set by another thread when the step has failed on another rank."""

    def begin(self) -> None:
        """Post the receives."""
        # whether there is a loss, the loss of the step, the losses of the microbatches
        self._message = torch.zeros(2 + self._microbatches, dtype=torch.float64)
        self.awaited = ""
        if (communicator := self._communicator) is None:
            return
        if self._last is None:
            self._pending = {self._source: self._receive(communicator, self._message, self._source)}
        else:
            tokens = torch.zeros(len(self._others), 1, dtype=torch.uint8)
            self._pending = {
                rank: self._receive(communicator, token, rank) for rank, token in zip(self._others, tokens)
            }

    def finish(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        """The loss of the step over all replicas and of each microbatch, the same on every rank."""
        if self._last is None:
            self._send(torch.zeros(1, dtype=torch.uint8), [self._source])
            self._wait_for(self._source, "the losses from")
        else:
            for rank in list(self._pending):
                self._wait_for(rank, "the end of the step on")
            if self._last.losses:
                self._fill(self._last.losses, weights)
            self._meet()
            if self.abort_requested:
                raise StepAbortedError
            # from here on the step has succeeded; nobody waits for a rank that dies before it receives this
            with suppress(TransportError):
                self._send(self._message, self._others)
        if not self._message[0]:
            return None, None
        return float(self._message[1]), self._message[2:].clone()

    def _receive(self, communicator: Communicator, message: Tensor, rank: int) -> dist.Work:
        purpose = ControlMessage.LOSSES if rank == self._source else ControlMessage.FINISHED
        return communicator.receive_host(message, rank, communicator.control_tag(purpose))

    def _send(self, message: Tensor, ranks: Sequence[int]) -> None:
        """Send to these ranks; they have received what was sent in the last step, because they finished it."""
        if (communicator := self._communicator) is not None:
            purpose = ControlMessage.FINISHED if self._last is None else ControlMessage.LOSSES
            tag = communicator.control_tag(purpose)
            self._sent = [communicator.send_host(message, rank, tag) for rank in ranks]

    def _wait_for(self, rank: int, what: str) -> None:
        self.awaited = f"{what} rank {rank}"
        wait(self._pending.pop(rank))
        self.awaited = ""

    def _fill(self, losses: dict[int, Tensor], weights: Sequence[float]) -> None:
        message, replication = self._message, self._config.replication
        message[0] = 1
        in_order = [whole(losses[microbatch]) for microbatch in range(self._microbatches)]
        message[2:] = torch.stack([loss.reshape(()).to(torch.float64) for loss in in_order]).cpu()
        shares = torch.tensor(weights, dtype=torch.float64)
        counted = shares > 0  # the mean over no tokens is not a number, and its weight is 0
        local = (message[2:][counted] * shares[counted]).sum() / replication.count
        self.awaited = "the losses of its replicas"
        message[1] = replication.total(local, self._config.device)
        self.awaited = ""

    def _meet(self) -> None:
        """Wait until the pipelines of the tensor-parallel ranks have finished the step too."""
        if self._tensor_groups:
            self.awaited = "the end of the step on its tensor-parallel ranks"
            token = torch.zeros(1, device=self._config.device)
            for group in self._tensor_groups:
                with transport_errors():
                    dist.all_reduce(token, group=group)
            token.cpu()  # on a device, the host has not waited yet
            self.awaited = ""

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
