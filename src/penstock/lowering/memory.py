"""Recomputation and offload of activations as actions, and policies that say for which microbatches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from penstock.arguments import printable, whole_number
from penstock.errors import ScheduleError
from penstock.ir.encoding import Bools, Ints, codes_of
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable
from penstock.lowering.passes import Pass, arrange

# Memory policies: which microbatches of which stages are recomputed or offloaded.
#
#     all           every microbatch
#     every=2       microbatches 0, 2, 4, ...
#     longer=4      microbatches that live longer: more than 4 compute steps of the rank between F and backward
#
# In text, stages come first: `0-2`, `0,3:every=2`, `0-2:longer=4`.


@dataclass(frozen=True)
class Policy:
    """Which microbatches: every `every`-th, of those that live longer than `longer` compute steps."""

    every: int = 1
    longer: int = -1

    def __post_init__(self) -> None:
        _require_number("policy: every", self.every, 1)
        _require_number("policy: longer", self.longer, -1)


def _require_number(name: str, value: object, least: int) -> None:
    if (number := whole_number(value)) is None or number < least:
        given = printable(repr(value))
        raise ScheduleError(f"{name} must be a whole number of at least {least} (given {given})")


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
        raise ScheduleError(f"unknown policy {printable(text)!r}; policies are {forms}", parameter="policy")
    policy = Policy(**{match["rule"]: int(match["n"])}) if match["rule"] else Policy()
    if match["stages"] is None:
        return None, policy
    ends = [[int(n) for n in part.split("-")] for part in match["stages"].split(",")]
    for first, last in ((each[0], each[-1]) for each in ends):
        if first > last:
            raise ScheduleError(f"the stages {first}-{last} are none; write {last}-{first}", parameter="stages")
        if num_stages is not None and last >= num_stages:
            raise ScheduleError(
                f"stages must be from 0 to {num_stages - 1} (given {printable(match['stages'])})",
                parameter="stages",
            )
    return tuple(dict.fromkeys(s for each in ends for s in range(each[0], each[-1] + 1))), policy


def chosen(table: ActionTable, name: str, stages: Iterable[int] | None, policy: Policy) -> Bools:
    """Per stage and microbatch: whether it has a backward and the policy is for it."""
    count = table.placement.num_stages
    is_chosen = np.zeros((count, table.microbatches), dtype=np.bool_)
    for stage in range(count) if stages is None else stages:
        if not 0 <= stage < count:
            problem = f"{name}: there is no stage {stage}: the schedule has stages 0 to {count - 1}"
            raise ScheduleError(problem, parameter="stages")
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


# Add RECOMPUTE, so that F keeps only its checkpoint.
#
#     recompute             0F0 0F1 0B0 0B1  ->  0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1
#     recompute, every=2    0F0 0F1 0B0 0B1  ->  0F0 0F1 0RECOMPUTE0 0B0 0B1
#
# RECOMPUTE is as late as possible, directly before the backward, so the activation is held for the shortest
# time; while the gradient is on its way, it runs in the bubble.


@dataclass(frozen=True)
class Recompute(Pass):
    """One RECOMPUTE for every microbatch of these stages, all unless given, that the policy is for.

    Microbatches that are recomputed already stay as they are, so passes with several policies can follow each
    other.
    """

    stages: tuple[int, ...] | None = None
    policy: Policy = field(default_factory=Policy)
    name: ClassVar[str] = "recompute"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with RECOMPUTE directly before the backward."""
        table = schedule.table
        new = chosen(table, self.name, self.stages, self.policy) & (table.at(Kind.RECOMPUTE) < 0)
        stage, microbatch = np.nonzero(new)
        before = table.slot[table.input_gradient[new]]
        return arrange(
            schedule,
            np.concatenate((table.part_rank, table.rank[before])),
            np.concatenate((table.slot * 2 + 1, before * 2)),
            np.concatenate((table.code, codes_of(Kind.RECOMPUTE, stage, microbatch))),
        )


# Add OFFLOAD and RELOAD, so that activations that live long wait on the host.
#
#     offload               0F0 0F1 0F2 0B2 0B1 0B0
#                       ->  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD1 0B2 0RELOAD0 0B1 0B0
#     offload, ahead=0  ->  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0
#
# OFFLOAD is directly after F, and RELOAD is `ahead` compute steps before its first use, by RECOMPUTE or by the
# backward, so that these steps hide the copy. What would be back before another step has run is not offloaded.


@dataclass(frozen=True)
class Offload(Pass):
    """OFFLOAD and RELOAD for every microbatch of these stages, all unless given, that the policy is for.

    Microbatches that are offloaded already stay as they are.
    """

    stages: tuple[int, ...] | None = None
    policy: Policy = field(default_factory=Policy)
    ahead: int = 1
    """How many compute steps of its rank a RELOAD starts before its use."""
    name: ClassVar[str] = "offload"

    def __post_init__(self) -> None:
        _require_number("ahead", self.ahead, 0)

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with OFFLOAD after F and RELOAD ahead of its use."""
        table = schedule.table
        new = chosen(table, self.name, self.stages, self.policy) & (table.at(Kind.OFFLOAD) < 0)
        stage, microbatch = np.nonzero(new)
        steps, after = steps_of(table), table.slot[table.forward[new]]
        reload_step = steps[table.slot[first_uses(table)[new]]] - self.ahead
        pays = reload_step > steps[after] + 1
        stage, microbatch, after, reload_step = stage[pays], microbatch[pays], after[pays], reload_step[pays]
        before = np.unique(table.slot[table.is_compute])[reload_step]
        codes = (table.code, *(codes_of(kind, stage, microbatch) for kind in (Kind.OFFLOAD, Kind.RELOAD)))
        return arrange(
            schedule,
            np.concatenate((table.part_rank, table.rank[after], table.rank[before])),
            np.concatenate((table.slot * 3 + 1, after * 3 + 2, before * 3)),
            np.concatenate(codes),
        )
