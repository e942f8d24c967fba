"""Policies: which microbatches of which stages a memory technique is for.

    all           every microbatch
    every=2       microbatches 0, 2, 4, ...
    longer=4      microbatches that live longer: more than 4 compute steps of the rank between F and backward

In text, stages come first: `0-2`, `0,3:every=2`, `0-2:longer=4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.arguments import printable, whole_number
from penstock.errors import ScheduleError
from penstock.ir.arrays import Bools, Ints
from penstock.ir.kinds import Kind
from penstock.ir.table import ActionTable

__all__ = ["Policy", "chosen", "first_uses", "parse_policy", "steps_of"]


@dataclass(frozen=True)
class Policy:
    """Which microbatches: every `every`-th, of those that live longer than `longer` compute steps."""

    every: int = 1
    longer: int = -1

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("longer", -1)):
            value = whole_number(getattr(self, name))
            if value is None or value < least:
                given = printable(repr(getattr(self, name)))
                raise ScheduleError(
                    f"policy: {name} must be a whole number of at least {least} (given {given})"
                )


_NUMBER = "[0-9]{1,9}"
_STAGES = f"{_NUMBER}(?:-{_NUMBER})?"
_TEXT = re.compile(
    rf"(?:(?P<stages>{_STAGES}(?:,{_STAGES})*)(?::|$))?(?:(?P<all>all)|(?P<rule>every|longer)=(?P<n>{_NUMBER}))?"
)


def parse_policy(text: str, num_stages: int | None = None) -> tuple[tuple[int, ...] | None, Policy]:
    """The stages, None for all, and the policy of a text such as `0-2:every=2`.

    With `num_stages`, stages that a schedule with so many does not have are refused.
    """
    match = _TEXT.fullmatch(text)
    if match is None or not text or text.endswith(":"):
        forms = "all, every=N, longer=N, or stages such as 0-2 or 0,3:every=2"
        raise ScheduleError(f"unknown policy {printable(text)!r}; policies are {forms}")
    policy = Policy(**{match["rule"]: int(match["n"])}) if match["rule"] else Policy()
    if match["stages"] is None:
        return None, policy
    ends = [[int(n) for n in part.split("-")] for part in match["stages"].split(",")]
    for first, last in ((each[0], each[-1]) for each in ends):
        if first > last:
            raise ScheduleError(f"the stages {first}-{last} are none; write {last}-{first}", argument="stages")
        if num_stages is not None and last >= num_stages:
            raise ScheduleError(
                f"stages must be from 0 to {num_stages - 1} (given {printable(match['stages'])})",
                argument="stages",
            )
    return tuple(dict.fromkeys(s for each in ends for s in range(each[0], each[-1] + 1))), policy


def chosen(table: ActionTable, name: str, stages: Iterable[int] | None, policy: Policy) -> Bools:
    """Per stage and microbatch: whether it has a backward and the policy is for it."""
    count = table.placement.num_stages
    is_chosen = np.zeros((count, table.microbatches), dtype=np.bool_)
    for stage in range(count) if stages is None else stages:
        if not 0 <= stage < count:
            problem = f"{name}: there is no stage {stage}: the schedule has stages 0 to {count - 1}"
            raise ScheduleError(problem, argument="stages")
        is_chosen[stage, :: policy.every] = True
    steps, use = steps_of(table), first_uses(table)
    there = (table.forward >= 0) & (use >= 0)
    life = steps[table.slots_of(use)] - steps[table.slots_of(table.forward)] - 1
    lives: Bools = is_chosen & there & (life > policy.longer)
    return lives


def steps_of(table: ActionTable) -> Ints:
    """Per slot: how many compute steps come before it, through all ranks."""
    computes: Ints = np.append(table.is_compute_slot, 0).astype(np.int64)
    return np.cumsum(computes) - computes


def first_uses(table: ActionTable) -> Ints:
    """Per stage and microbatch: the part that first uses what F holds, RECOMPUTE or I or B."""
    again = table.at(Kind.RECOMPUTE)
    return np.where(again >= 0, again, table.input_gradient)
