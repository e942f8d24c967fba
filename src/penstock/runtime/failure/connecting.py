"""Failures while the ranks of a pipeline connect: errors name a rank that ended, is silent or is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.failure.job import current_watch
from penstock.runtime.failure.lost_ranks import describe_lost_ranks
from penstock.runtime.session.config import ExecutionConfig
from penstock.runtime.transport.stores import STORE_IS_SILENT
from penstock.runtime.transport.transport_errors import TransportError


@contextmanager
def connecting(
    config: ExecutionConfig,
    partners: Sequence[int] | None = None,
    reason: Callable[[str], str] = lambda lost: lost,
) -> Iterator[None]:
    """If the job's store or a connection fails inside, say which rank is lost.

    `partners` are the world ranks that this rank connects to, by default those of the pipeline. `reason` adds
    why partners have not connected to what is known of lost ranks.
    """
    members = config.members if partners is None else partners
    others = "the others" if partners is None else "those of other pipelines that train the same stages"
    try:
        yield
    except TransportError as error:
        why = describe_lost_ranks(members, of_pipeline=partners is None)
        if STORE_IS_SILENT not in str(error):
            why = reason(why)
        raise PipelineError(
            f"rank {config.rank} of the pipeline could not connect to {others} (world ranks "
            f"{listed(members)}) within {config.timeout.total_seconds():g} s: {why or error}"
        ) from error


def raise_if_ended(members: Sequence[int]) -> None:
    """Raise if a process has ended that the pipeline needs."""
    watch = current_watch()
    if watch is not None and any(member in watch.ended for member in members):
        raise TransportError(describe_lost_ranks(members))
