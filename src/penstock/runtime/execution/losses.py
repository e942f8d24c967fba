"""The losses of a step on their way from the last stage's rank to all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.ir.schedule import Schedule
from penstock.runtime.dtensors import whole
from penstock.runtime.execution.connections import Wiring
from penstock.runtime.execution.stage import Stage

__all__ = ["Losses"]

_LOSSES = 0  # the purpose of the control message


class Losses:
    """One step's: made before it, shared after it, so that every rank has the same."""

    def __init__(self, wiring: Wiring, schedule: Schedule, last: Stage | None) -> None:
        self._links, self._last, self._m = wiring.links, last, schedule.microbatches
        self._tag = 0 if wiring.links is None else wiring.links.control_tag(_LOSSES)
        self._source = schedule.placement.stage_to_rank[-1]
        self._others = [rank for rank in range(schedule.num_ranks) if rank != self._source]
        self._replication, self._device = wiring.plan.replication, wiring.plan.device
        self._numbers = torch.zeros(2 + self._m, dtype=torch.float64)
        self._under_way: list[dist.Work] = []

    def begin(self) -> None:
        """Get ready to receive them."""
        if self._last is None and self._links is not None:
            self._under_way = [self._links.receive_host(self._numbers, self._source, self._tag)]

    def everywhere(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        """The loss of the step over all replicas, and that of every microbatch, the same on every rank."""
        numbers, m = self._numbers, self._m
        if self._last is not None:
            if found := self._last.losses:
                numbers[0] = 1
                numbers[2:] = torch.stack(
                    [whole(found[i]).reshape(()).to(torch.float64) for i in range(m)]
                ).cpu()
                shares = torch.tensor(weights, dtype=torch.float64)
                counted = shares > 0  # the mean over no tokens is not a number, and counts for nothing
                mine = (numbers[2:][counted] * shares[counted]).sum() / self._replication.count
                numbers[1] = self._replication.total(mine, self._device)
            if self._links is not None:
                self._under_way = [self._links.send_host(numbers, rank, self._tag) for rank in self._others]
        for work in self._under_way:
            work.wait()
        if not numbers[0]:
            return None, None
        return float(numbers[1]), numbers[2:]

    def drop(self) -> None:
        """Let go of messages under way, which hold on to the connections."""
        self._under_way = []
        self._links = None
