"""The ranks that save or load together: what fails on one of them is raised on all, and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from penstock import arguments
from penstock.errors import CheckpointError, PipelineError
from penstock.runtime.transport.process_groups import Group, members_of, process_group

__all__ = ["Answers", "FoundError", "Group", "Together", "some"]

T = TypeVar("T")

_SHOWN = 20  # names in one fault


class FoundError(Exception):
    """What one rank found to be wrong; it becomes a part of the `CheckpointError` that all ranks raise."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Answers(Generic[T]):
    """What every rank gave, in the order of the ranks (None where it failed), and all faults, each once.

    `error` is what was raised on this rank.
    """

    def __init__(self, values: Sequence[T | None], faults: Sequence[str], error: Exception | None) -> None:
        self.values = values
        self.faults = list(dict.fromkeys(faults))
        self.error = error


class Together:
    """The ranks of a group, or of the world, or this process alone; `doing` begins every error."""

    def __init__(self, group: Group, doing: str) -> None:
        self.doing = doing
        try:
            self.group = process_group(group, "the group", "pp")
            self.members, self.rank = members_of(self.group)
        except PipelineError as error:
            raise CheckpointError(doing, [str(error)]) from None

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return len(self.members) == 1

    def tried(self, work: Callable[[], T]) -> Answers[T]:
        """Do something on every rank and gather what comes of it; raises only if a rank is lost."""
        value: T | None = None
        faults: Sequence[str] = ()
        raised: Exception | None = None
        try:
            value = work()
        except FoundError as error:
            faults = error.faults
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks are waiting
            raised, faults = error, [f"rank {self.rank}: {type(error).__name__}: {error}"]
        answers = self._gathered((value, faults))
        return Answers(
            [given for given, _ in answers], [each for _, found in answers for each in found], raised
        )

    def done(self, work: Callable[[], T]) -> list[T]:
        """What every rank gave; if it failed anywhere, all faults are raised on every rank."""
        answers = self.tried(work)
        self.refuse(answers.faults, answers.error)
        return [cast("T", value) for value in answers.values]

    def done_once(self, work: Callable[[], None]) -> None:
        """Do something on the first rank while the others wait."""
        self.done(work if self.is_first else lambda: None)

    def refuse(self, faults: Sequence[str], cause: Exception | None = None) -> None:
        """Raise what is wrong, if anything is; every rank must have found the same."""
        if faults:
            raise CheckpointError(self.doing, list(dict.fromkeys(faults))) from cause

    def changed(self, work: Callable[[], None]) -> None:
        """Do what changes the model on every rank; if it fails anywhere, it is no longer what it was."""
        answers = self.tried(work)
        if answers.faults:
            halfway = "the model may have been changed in part: give it other weights before it is used"
            self.refuse([*answers.faults, halfway], answers.error)

    def _gathered(self, value: Any) -> list[Any]:
        if self.alone:
            return [value]
        found: list[Any] = [None] * len(self.members)
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error
        return found

    def lost(self, error: BaseException) -> CheckpointError:
        """What to raise when the ranks cannot hear each other any more."""
        return CheckpointError(self.doing, [f"rank {self.rank} lost the connection to another rank: {error}"])


def some(names: Sequence[object]) -> str:
    """The names, but not a page of them."""
    return arguments.some(names, _SHOWN)
