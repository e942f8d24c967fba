"""Sends the losses of a step from the rank of the last stage to all other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.dtensors import whole
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.stage import Stage
from penstock.runtime.transport.communicator import ControlMessage
from penstock.runtime.transport.transport_errors import wait

__all__ = ["LossExchange"]


class LossExchange:
    """The exchange of one step: receives are posted before it, losses are sent after it."""

    def __init__(self, connection: Connection, last: Stage | None) -> None:
        schedule = connection.config.schedule
        self._communicator, self._last = connection.communicator, last
        self._microbatches = schedule.microbatches
        self._tag = 0 if self._communicator is None else self._communicator.control_tag(ControlMessage.LOSSES)
        self._source = schedule.placement.stage_to_rank[-1]
        self._others = [rank for rank in range(schedule.num_ranks) if rank != self._source]
        self._replication, self._device = connection.config.replication, connection.config.device
        # whether there is a loss, the loss of the step, the losses of the microbatches
        self._message = torch.zeros(2 + self._microbatches, dtype=torch.float64)
        self._pending: list[dist.Work] = []

    def begin(self) -> None:
        """Post the receive."""
        if self._last is None and self._communicator is not None:
            self._pending = [self._communicator.receive_host(self._message, self._source, self._tag)]

    def finish(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        """The loss of the step over all replicas and of each microbatch, the same on every rank."""
        message = self._message
        if self._last is not None:
            if self._last.losses:
                self._fill(self._last.losses, weights)
            if self._communicator is not None:
                self._pending = [
                    self._communicator.send_host(message, rank, self._tag) for rank in self._others
                ]
        for work in self._pending:
            wait(work)
        if not message[0]:
            return None, None
        return float(message[1]), message[2:]

    def _fill(self, losses: dict[int, Tensor], weights: Sequence[float]) -> None:
        message = self._message
        message[0] = 1
        in_order = [whole(losses[microbatch]) for microbatch in range(self._microbatches)]
        message[2:] = torch.stack([loss.reshape(()).to(torch.float64) for loss in in_order]).cpu()
        shares = torch.tensor(weights, dtype=torch.float64)
        counted = shares > 0  # the mean over no tokens is not a number, and its weight is 0
        local = (message[2:][counted] * shares[counted]).sum() / self._replication.count
        message[1] = self._replication.total(local, self._device)

    def abandon(self) -> None:
        """Release pending messages, which keep the connections open."""
        self._pending = []
        self._communicator = None
