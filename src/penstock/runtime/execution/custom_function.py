"""User functions that run in place of actions of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock.ir.action import Step
from penstock.runtime.execution.stage import Stage

__all__ = ["Custom", "CustomFunction"]


@dataclass(frozen=True)
class Custom:
    """The argument of a user function: the action that it replaces."""

    action: Step
    stages: Mapping[int, Stage]
    """The stages of this rank."""
    run: Callable[[], None]
    """What the runtime does without the function; for an overlapped pair, its parts one after the other."""
    parts: tuple[Custom, ...] = ()
    """For an overlapped pair: the forward and the backward, with the functions for their kinds."""


CustomFunction: TypeAlias = Callable[[Custom], None]
