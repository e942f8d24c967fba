"""Which partners a pipeline has and which other ranks expect it to have: nobody trains alone by mistake.

A pipeline without `replicas=` has no connection to a rank that waits for it as a replica. So each pipeline of a
job with several ranks is recorded, and a rank that has waited in vain tells it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.execution.config import ExecutionConfig
from penstock.runtime.failure.agreement import digest
from penstock.runtime.failure.job import watch_of_others
from penstock.runtime.failure.partner_records import PartnerRecords, PipelineRecord, partner_records

__all__ = ["ExpectedPartners"]


class ExpectedPartners:
    """The partners of one pipeline on this rank, over all its connections."""

    def __init__(self, config: ExecutionConfig) -> None:
        self._seconds = config.timeout.total_seconds()
        self._pipeline = PipelineRecord(_stages(config))
        self._records: PartnerRecords | None = None

    def begin(self, config: ExecutionConfig, groups: Sequence[tuple[int, ...]]) -> None:
        """The pipeline connects, with these groups of partners."""
        watch = watch_of_others(config.timeout)
        self._records = None if watch is None else partner_records(watch)
        replicas = {rank for group in config.replication.groups for rank in dist.get_process_group_ranks(group)}
        self._pipeline.groups = {group: replicas.issuperset(group) for group in groups}
        if self._records is not None:
            self._records.add(self._pipeline)

    def are_replicas(self, group: tuple[int, ...]) -> bool:
        """Whether the ranks of a group compute on different data."""
        return self._pipeline.groups[group]

    def connected(self) -> None:
        """The pipeline is connected."""
        if self._records is not None:
            self._records.connected(self._pipeline)

    def disconnected(self) -> None:
        """The pipeline is closed, or its connections have failed."""
        self._pipeline.is_connected = False

    def closed(self, name: str) -> None:
        """This rank has closed the connection of this name, and not after a failure."""
        if self._records is not None:
            self._records.closed(name)

    def reason(self, group: tuple[int, ...], lost: str) -> str:
        """Why the partners of a group have not connected; `lost` says which of them have ended, if any.

        If none has, they are told that this rank has waited for them.
        """
        if self._records is None:
            return lost
        if not lost:
            return self._records.absent_partners(self._pipeline, group, self._seconds)
        return "; ".join(filter(None, (lost, self._records.noticed_close(group))))

    def closed_by(self, name: str, group: tuple[int, ...]) -> list[int]:
        """The partners that have closed the connection of this name."""
        return [] if self._records is None else self._records.closed_by(name, group)

    def raise_if_unpaired(self) -> None:
        """Raise if another rank expects this pipeline among its partners."""
        if self._records is not None and (problem := self._records.problem(self._pipeline)):
            raise PipelineError(problem)


def _stages(config: ExecutionConfig) -> str:
    """A digest of the numbers of this rank's stages and the shapes of their parameters, sharded or not."""
    shapes = {
        stage: [tuple(each.shape) for each in module.parameters()] for stage, module in config.trained.items()
    }
    return digest(f"{config.schedule.num_stages} {sorted(shapes.items())}")
