"""Which ranks run another schedule: the schedule in each rank's state, compared with the one that was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.arguments import plural
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.traces.message_orders import message_orders
from penstock.traces.rank_state import RankState

__all__ = ["ScheduleDifference", "difference_of", "reference_of"]


class ScheduleDifference(NamedTuple):
    """How the schedule of a rank differs: `another-schedule`, or `skipped-send` if only sends are missing."""

    kind: str
    message: str


def reference_of(states: Sequence[RankState], given: Schedule | None) -> tuple[Schedule, list[str]]:
    """The schedule that the ranks are compared with: that of most ranks, the given one if they run it."""
    counts = Counter(state.schedule for state in states if state.mode != "eval") or Counter(
        state.schedule for state in states
    )
    if not counts:
        assert given is not None, "records need a schedule to be aligned with"
        return message_orders(given)[0], []
    ranked = sorted(counts, key=lambda schedule: -counts[schedule])
    if given is None or all(state.mode == "eval" for state in states):
        tied = len(ranked) > 1 and counts[ranked[0]] == counts[ranked[1]]
        text = "the ranks run different schedules, and --schedule says which of them is meant"
        return ranked[0], [text] * tied
    same = [schedule for schedule in ranked if _is_same(schedule, given)]
    if same:
        return same[0], []
    if len(ranked) > 1:
        return message_orders(given)[0], []
    difference = _first_difference(ranked[0], _like(given, ranked[0]))
    text = f"all ranks run {ranked[0].name}, which is not the given schedule {given.name}: {difference}"
    return ranked[0], [text]


def difference_of(state: RankState, reference: Schedule) -> ScheduleDifference | None:
    """How the schedule of a rank differs from the one that is meant; None if it does not."""
    if _is_same(state.schedule, reference) or state.mode == "eval":
        return None
    sizes = [_sizes(schedule) for schedule in (state.schedule, reference)]
    if sizes[0] != sizes[1]:
        return ScheduleDifference("another-schedule", f"it has {sizes[0]}, the others {sizes[1]}")
    expected = _like(reference, state.schedule)
    own, meant = (list(map(str, each.ranks[state.rank])) for each in (state.schedule, expected))
    missing = Counter(meant) - Counter(own)
    without = [step for step in meant if not missing[step]]
    if missing and own == without and all("SEND" in step for step in missing):
        return ScheduleDifference("skipped-send", f"its list has no {', '.join(missing)}")
    return ScheduleDifference("another-schedule", _first_difference(state.schedule, expected, state.rank))


def _like(schedule: Schedule, other: Schedule) -> Schedule:
    """The schedule with messages if the other has them, without if not; sharding is left out."""
    if other.table.has_communication:
        orders = message_orders(schedule)
        return min(orders, key=lambda order: sum(a != b for a, b in zip(order.ranks, _plain(other).ranks)))
    return schedule.only(PASS_KINDS)


def _plain(schedule: Schedule) -> Schedule:
    """Only computation and messages."""
    return schedule.only([kind for kind in Kind if kind.is_communication or kind in PASS_KINDS])


def _is_same(schedule: Schedule, other: Schedule) -> bool:
    """Whether two schedules are equal, apart from what only one of them has: messages, and sharding."""
    if _sizes(schedule) != _sizes(other):
        return False
    if schedule.table.has_communication and other.table.has_communication:
        return _plain(schedule) == _plain(other)
    return schedule.only(PASS_KINDS) == other.only(PASS_KINDS)


def _sizes(schedule: Schedule) -> str:
    return (
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')} (on ranks "
        f"{list(schedule.placement.stage_to_rank)}), {plural(schedule.microbatches, 'microbatch')}"
    )


def _first_difference(schedule: Schedule, meant: Schedule, rank: int | None = None) -> str:
    """The first step that differs, in the list of this rank if it differs there."""
    if _sizes(schedule) != _sizes(meant):
        return f"it has {_sizes(schedule)}, and not {_sizes(meant)}"
    plain, expected = (_plain(schedule), _plain(meant))
    order = [rank] if rank is not None else []
    for each in [*order, *range(schedule.num_ranks)]:
        own, other = (list(map(str, one.ranks[each])) for one in (plain, expected))
        for number in range(max(len(own), len(other))):
            texts = [row[number] if number < len(row) else "the end" for row in (own, other)]
            if texts[0] != texts[1]:
                return f"rank {each}, step {number}: {texts[0]} instead of {texts[1]}"
    return "only in sharding or memory actions"
