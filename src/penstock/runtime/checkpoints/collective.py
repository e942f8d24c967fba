"""Work that several ranks do together: an error on one rank is raised on all, so that no rank waits forever."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from penstock import arguments
from penstock.errors import CheckpointError, PipelineError
from penstock.runtime.failure.process_detector import describe_lost_ranks, guarded_collective
from penstock.runtime.transport.process_groups import Group, members_of, process_group
from penstock.runtime.transport.transport_errors import TransportError, transport_errors

T = TypeVar("T")

some = partial(arguments.some, most=20)
"""Join the first names, and append the number of the others."""


class RankError(Exception):
    """Problems found on one rank; they become a part of the `CheckpointError` that all ranks raise."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Change(Protocol):
    """A change of the model on one rank, checked before any rank applies it."""

    problems: list[str]
    """Why it cannot be applied on this rank."""
    used: Any
    """What this rank uses of the source, in a form that can be pickled."""

    def unused(self, used: Sequence[Any]) -> list[str]:
        """Return the problems with what no rank uses; `used` has an entry for each rank."""

    def apply(self) -> None:
        """Change the model."""


C = TypeVar("C", bound=Change)


class Collective:
    """The ranks of a group, or of the world, or this process alone; `failure` begins every error."""

    def __init__(self, group: Group, failure: str) -> None:
        self.failure = failure
        try:
            self.group = process_group(group, "the group", "pp")
            self.members, self.rank = members_of(self.group)
        except PipelineError as error:
            raise CheckpointError(failure, [str(error)]) from None
        self.is_first, self.is_single = self.rank == 0, len(self.members) == 1

    def _gather(self, work: Callable[[], T]) -> tuple[list[T | None], list[str], Exception | None]:
        """Run `work` on every rank; return all results, the problems of all ranks, and what this rank raised.

        The result of a rank where it failed is None. Raises only if a rank is lost.
        """
        raised: Exception | None = None
        try:
            result: tuple[T | None, Sequence[str]] = work(), ()
            if not self.is_single:
                pickle.dumps(result)  # raises here and not in the collective, where the other ranks would wait
        except RankError as error:
            result = None, error.problems
        except Exception as error:  # noqa: BLE001 -- the other ranks wait, whatever the error is
            raised, result = error, (None, [f"rank {self.rank}: {type(error).__name__}: {error}"])
        gathered: list[Any] = [result] * len(self.members)
        if not self.is_single:
            with self.transport():
                dist.all_gather_object(gathered, result, group=self.group)
        every = dict.fromkeys(each for _, found in gathered for each in found)
        return [value for value, _ in gathered], list(every), raised

    def run(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; a failure on any rank is raised on every rank."""
        results, problems, error = self._gather(work)
        self.raise_problems(problems, error)
        return cast("list[T]", results)

    def run_on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on the first rank while the others wait."""

        def on_first() -> None:
            if self.is_first:
                work()

        self.run(on_first)

    def run_change(self, prepare: Callable[[], C]) -> C:
        """Prepare a change on every rank; apply it only if no rank has found a problem."""
        prepared: list[C] = []

        def check() -> tuple[list[str], Any]:
            prepared.append(prepare())
            return prepared[0].problems, prepared[0].used

        results, problems, error = self._gather(check)
        checked = [result for result in results if result is not None]
        problems += [problem for found, _ in checked for problem in found]
        if prepared and len(checked) == len(results):
            problems += prepared[0].unused([used for _, used in checked])
        self.raise_problems(problems, error)
        _, problems, error = self._gather(prepared[0].apply)
        if problems:
            problems.append("the model may have been changed in part: load other weights before it is used")
        self.raise_problems(problems, error)
        return prepared[0]

    def raise_problems(self, problems: Sequence[str], cause: Exception | None = None) -> None:
        """Raise a `CheckpointError` if there are problems; they must be the same on every rank."""
        if problems:
            raise CheckpointError(self.failure, list(dict.fromkeys(problems))) from cause

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Collectives: if they fail because another rank is gone, the error says which."""
        try:
            with guarded_collective(self.members), transport_errors():
                yield
        except TransportError as error:
            lost = describe_lost_ranks(self.members)
            problem = f"rank {self.rank} lost the connection to another rank: {error}"
            raise CheckpointError(self.failure, [lost or problem]) from error
