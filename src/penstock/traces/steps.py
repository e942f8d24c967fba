"""Training steps in a trace: where each begins on each rank, which are complete, and which belong together.

A step begins on a rank with the same action every time, and with what prepares it (UNSHARD, RECV). A step that
the recording cut at its beginning or end is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.arguments import plural
from penstock.errors import TraceError
from penstock.ir.action import Action, Kind
from penstock.traces.recorded import RankTrace, Recorded

__all__ = ["matched_steps", "renumbered"]

_PREPARES = (Kind.UNSHARD, Kind.RECV_F, Kind.RECV_B)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)

RankStep = list[Recorded]


def renumbered(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces with stages and microbatches of each step, where they name none.

    In 1F1B the first rank has no live activation only between two steps, so it tells the number of
    microbatches of a step.
    """
    found = [_on_its_stage(trace, rank) if trace.single_stage else trace for rank, trace in enumerate(traces)]
    through = [trace for trace in found if trace.numbered_through]
    if not through:
        return found
    if len(through) < len(found):
        named = next(trace.source for trace in found if not trace.numbered_through)
        raise TraceError([f"{through[0].source}: no range for each action, unlike {named}: not of one run"])
    microbatches = _microbatches(through[0])
    return [_numbered_by_step(trace, microbatches) for trace in through]


def _on_its_stage(trace: RankTrace, stage: int) -> RankTrace:
    steps = [(each, each.step.parts[0]) for each in trace.recorded]
    moved = [each._replace(step=Action(part.kind, stage, part.microbatch)) for each, part in steps]
    return replace(trace, recorded=moved)


def _microbatches(first: RankTrace) -> int:
    """How many there are in most steps."""
    live = list(accumulate(1 if each.step.kind is Kind.F else -1 for each in first.recorded))
    ends = [index for index, count in enumerate(live) if count == 0]
    lengths = Counter((end - before) // 2 for before, end in zip([-1, *ends], ends))
    return max(lengths, key=lambda length: (lengths[length], length))


def _numbered_by_step(trace: RankTrace, microbatches: int) -> RankTrace:
    """Microbatches from 0 in each step; a step that is cut at the beginning is left out."""
    cut = sum(each.step.kind is Kind.F for each in trace.recorded) % microbatches
    found = []
    for each in trace.recorded:
        part = each.step.parts[0]
        assert part.microbatch is not None
        if part.microbatch >= cut:
            number = (part.microbatch - cut) % microbatches
            found.append(each._replace(step=Action(part.kind, part.stage, number)))
    return replace(trace, recorded=found)


def matched_steps(traces: Sequence[RankTrace]) -> list[list[RankStep]]:
    """The complete steps, each as one list of actions per rank."""
    by_rank = [_complete_steps(trace) for trace in traces]
    if problems := [
        f"{trace.source}: no complete step: every F needs its backward in the same step. Start and stop the "
        "profiler between two training steps"
        for trace, steps in zip(traces, by_rank)
        if not steps
    ]:
        raise TraceError(problems)
    shifts = [_shift(by_rank[0], steps) for steps in by_rank]
    count = len(by_rank[0])
    matched = [
        [steps[index + shift] for steps, shift in zip(by_rank, shifts)]
        for index in range(count)
        if all(0 <= index + shift < len(steps) for steps, shift in zip(by_rank, shifts))
    ]
    if not matched:
        raise TraceError([f"{traces[0].source}: no complete step in {plural(len(traces), 'file')}"])
    return matched


def _shift(first: list[RankStep], steps: list[RankStep]) -> int:
    """By which number of steps this rank's list is ahead of the first rank's: middles are nearest then."""
    ours, theirs = ([(step[0].start + step[-1].end) // 2 for step in each] for each in (first, steps))
    if len(ours) == len(theirs):
        return 0
    candidates = range(-len(ours) + 1, len(theirs))

    def distance(shift: int) -> float:
        pairs = [(a, theirs[i + shift]) for i, a in enumerate(ours) if 0 <= i + shift < len(theirs)]
        return sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else float("inf")

    return min(candidates, key=lambda shift: (distance(shift), abs(shift)))


def _complete_steps(trace: RankTrace) -> list[RankStep]:
    """The steps of a rank, by the action they begin with that gives most complete steps."""
    compute = [each.step.parts[0] for each in trace.recorded if each.step.kind.is_compute]
    if not compute:
        return []
    stage = min(part.stage for part in compute)
    anchors = (Action(Kind.F, stage, 0), compute[0])
    splits = ([step for step in _split(trace.recorded, anchor) if _is_complete(step)] for anchor in anchors)
    return max(splits, key=len)


def _split(recorded: Sequence[Recorded], anchor: Action) -> list[RankStep]:
    """The lists that begin with this action, each with what prepares it."""
    starts = [index for index, each in enumerate(recorded) if anchor in each.step.parts]
    for number, index in enumerate(starts):
        first = index
        while first > 0 and recorded[first - 1].step.kind in _PREPARES:
            first -= 1
        starts[number] = first
    return [list(recorded[a:b]) for a, b in zip(starts, [*starts[1:], len(recorded)])]


def _is_complete(step: RankStep) -> bool:
    """Whether each F has its backward and each backward its F, once."""
    parts = Counter((part.kind, part.stage, part.microbatch) for each in step for part in each.step.parts)
    compute = {key: count for key, count in parts.items() if key[0] in (Kind.F, *_BACKWARDS)}
    if any(count > 1 for count in compute.values()):
        return False
    made = {key[1:] for key in compute if key[0] is Kind.F}
    full = {key[1:] for key in compute if key[0] is Kind.B}
    split = {key[1:] for key in compute if key[0] is Kind.I}
    weights = {key[1:] for key in compute if key[0] is Kind.W}
    return bool(made) and made == full | split and weights <= split and not full & split
