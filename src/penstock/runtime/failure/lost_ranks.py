"""Ranks that are lost outside of steps: in collectives of torch.distributed, and while ranks connect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.failure.job import abort_groups, current_watch
from penstock.runtime.failure.links import Ended
from penstock.runtime.failure.watch import SILENT_SECONDS, JobWatch
from penstock.runtime.transport.process_groups import rank_name
from penstock.runtime.transport.stores import StoreSilentError
from penstock.runtime.transport.transport_errors import TransportError

# Collectives of torch.distributed outside of steps: a rank that ended or does not answer ends them.


_NOTICE_SECONDS = 2.5
"""How long the end of a process may take to be known here."""
_CLOSE_SECONDS = 2.0
"""How long its connections may take to end; a process that it has forked may keep them open."""


@contextmanager
def watched_collective(members: Sequence[int]) -> Iterator[None]:
    """Abort the process groups of this process if a rank ends or is silent; then the collective raises."""
    watch = current_watch()
    guard = None if watch is None else _Guard(watch, members)
    try:
        yield
    finally:
        if watch is not None and guard is not None:
            watch.remove_listener(guard)


class _Guard:
    """Listens to the watch during one collective."""

    def __init__(self, watch: JobWatch, members: Sequence[int]) -> None:
        self._watch, self._members = watch, [rank for rank in members if rank != watch.rank]
        self._aborted = False
        self._lost_at: float | None = None
        watch.add_listener(self)

    def on_message(self, message: dict[str, Any]) -> None:
        """A failed step of another rank does not concern this collective."""

    def on_end(self, ended: Ended) -> None:
        """A rank that ended is noticed at the next beat."""

    def on_beat(self) -> None:
        """Abort if a rank is lost."""
        watch, now = self._watch, time.monotonic()
        if self._lost_at is None and any(rank in watch.ended for rank in self._members):
            self._lost_at = now + _CLOSE_SECONDS
        is_silent = any(watch.silence(rank) > watch.timeout for rank in self._members)
        if not self._aborted and (is_silent or (self._lost_at is not None and now > self._lost_at)):
            self._aborted = True
            abort_groups()


def describe_lost_ranks(members: Sequence[int], *, of_pipeline: bool = True) -> str:
    """Which of these world ranks have ended or do not answer, after a collective with them has failed.

    They are numbered as the ranks of a pipeline, or else by world rank alone.
    """
    watch = current_watch()
    if watch is None:
        return ""
    end = time.monotonic() + _NOTICE_SECONDS
    names = [rank_name(*each) if of_pipeline else f"world rank {each[1]}" for each in enumerate(members)]
    while not (texts := _texts(watch, dict(zip(members, names)))) and time.monotonic() < end:
        time.sleep(0.02)
    return "; ".join(texts)


def _texts(watch: JobWatch, names: Mapping[int, str]) -> list[str]:
    """One text for each lost rank; those that exited by themselves are named only if there are no others."""
    lost: list[str] = []
    exited: list[str] = []
    for member, name in names.items():
        if (ended := watch.ended.get(member)) is not None:
            (exited if ended.reason else lost).append(f"{name} {ended.verb}: {ended}")
        elif watch.silence(member) > SILENT_SECONDS:
            lost.append(f"{name} does not answer: {watch.describe_silence(member)}")
    return lost or exited


# Failures while the ranks of a pipeline connect: errors name a rank that ended, is silent or is missing.


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
        if not isinstance(error, StoreSilentError):
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
