"""Why a pipeline hangs: where each rank is, who waits for whom, and which rank is the culprit.

Each wait is followed to the rank at its other end, until a rank is reached that waits for nobody, has no state,
or claims to have sent what did not arrive. Where the waits close a cycle, the schedule itself deadlocks.

    rank 0 at 0B0  -- waits for 0RECV_B0 -->  rank 1 at 1F2  -- waits for 1RECV_F2 -->  rank 0 is past 0SEND_F2
                                                                                       culprit: rank 0
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from penstock.arguments import listed, plural, some
from penstock.errors import ActionError, FormatError, Message, Parameter, ScheduleError
from penstock.ir.action import Action, parse_action
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.traces.diagnose.flight_recorder import (
    FlightRecord,
    PickleRefusedError,
    PipelineEvidence,
    align_records,
    is_flight_record,
    load_flight_record,
    message_orders,
    unpickle_plain,
)
from penstock.traces.diagnose.rank_state import STATE_FORMAT, RankState, load_state

Peer = Literal["missing", "behind", "on its way", "there", "passed", "not in its list"]
"""Where the rank at the other end is: it has no state, it has not begun the step, it has not reached the other
end of the message, it is at it, it is past it, or its list does not have it."""


@dataclass(frozen=True)
class Wait:
    """A rank that waits for a message."""

    rank: int
    message: Action
    """Its SEND or RECV."""
    for_rank: int
    counterpart: Action
    """The SEND or RECV of the other rank."""
    position: int
    """The place of the counterpart in the other rank's list; -1 if unknown."""
    peer: Peer

    @property
    def is_receive(self) -> bool:
        """Whether it waits to receive."""
        return not self.message.kind.is_send


def _wait(state: RankState, states: Mapping[int, RankState], schedule: Schedule) -> Wait | None:
    """Return the wait of a rank, if it waits for a message of the schedule."""
    try:
        message = parse_action(state.awaits)
    except ActionError:
        return None
    if not isinstance(message, Action) or message.kind.peer is None:
        return None
    rank_of_stage = schedule.placement.stage_to_rank
    if not 0 <= message.other_end < len(rank_of_stage):
        return None
    peer = rank_of_stage[message.other_end]
    counterpart = Action(message.kind.peer, message.other_end, message.microbatch, message.stage)
    where, position = _where(state, states.get(peer), counterpart)
    return Wait(state.rank, message, peer, counterpart, position, where)


def _where(state: RankState, peer: RankState | None, counterpart: Action) -> tuple[Peer, int]:
    if peer is None:
        return "missing", -1
    own = enumerate(peer.schedule.ranks[peer.rank])
    position = next((number for number, action in own if counterpart in action.parts), -1)
    if position < 0:
        return "not in its list", position
    calls_behind = state.call_number - peer.call_number
    if calls_behind > 0 or (calls_behind == 0 and peer.mode == "connecting"):
        return "behind", position
    if calls_behind < 0 or not peer.runs:
        return "passed", position
    if peer.position == position:
        return "there", position
    return ("passed" if peer.position > position else "on its way"), position


_PLAIN_KINDS = [kind for kind in Kind if kind.is_communication or kind in PASS_KINDS]
"""Only computation and messages."""


def _reference(states: Sequence[RankState], given: Schedule | None) -> tuple[Schedule, list[Message]]:
    """The schedule that the ranks are compared with: that of most ranks, the given one if they run it."""
    training = [state for state in states if state.mode != "eval"]
    counts = Counter(state.schedule for state in training or states)
    ranked = sorted(counts, key=lambda schedule: -counts[schedule])
    if given is None or not training:
        tied = len(ranked) > 1 and counts[ranked[0]] == counts[ranked[1]]
        text = "the ranks run different schedules: give the schedule of this run as "
        return ranked[0], [Message(text, Parameter("schedule"))] * tied
    if same := [schedule for schedule in ranked if _is_same(schedule, given)]:
        return same[0], []
    if len(ranked) > 1:
        return message_orders(given)[0], []
    difference = _first_difference(ranked[0], _like(given, ranked[0]))
    text = f"all ranks run {ranked[0].name}, which is not the given schedule {given.name}: {difference}"
    return ranked[0], [Message(text)]


def _difference(state: RankState, reference: Schedule) -> Finding | None:
    """How the schedule of a rank differs from the one that is meant: at all, or only by sends it has not."""
    if _is_same(state.schedule, reference) or state.mode == "eval":
        return None
    sizes = [_sizes(schedule) for schedule in (state.schedule, reference)]
    if sizes[0] != sizes[1]:
        return Finding("another-schedule", (state.rank,), f"it has {sizes[0]}, the others {sizes[1]}")
    expected = _like(reference, state.schedule)
    own, meant = (list(each.ranks[state.rank]) for each in (state.schedule, expected))
    missing = Counter(meant) - Counter(own)
    without = [action for action in meant if not missing[action]]
    if missing and own == without and all(action.kind.is_send for action in missing):
        return Finding("skipped-send", (state.rank,), f"its list has no {listed(missing)}")
    text = _first_difference(state.schedule, expected, state.rank)
    return Finding("another-schedule", (state.rank,), text)


def _like(schedule: Schedule, other: Schedule) -> Schedule:
    """The schedule with messages if the other has them, without if not; sharding is left out."""
    if other.table.has_communication:
        orders = message_orders(schedule)
        return min(
            orders, key=lambda order: sum(a != b for a, b in zip(order.ranks, other.only(_PLAIN_KINDS).ranks))
        )
    return schedule.only(PASS_KINDS)


def _is_same(schedule: Schedule, other: Schedule) -> bool:
    """Whether two schedules are equal, apart from what only one of them has: messages, and sharding."""
    if _sizes(schedule) != _sizes(other):
        return False
    both = schedule.table.has_communication and other.table.has_communication
    kinds = _PLAIN_KINDS if both else PASS_KINDS
    return schedule.only(kinds) == other.only(kinds)


def _sizes(schedule: Schedule) -> str:
    return (
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')} (on ranks "
        f"{list(schedule.placement.stage_to_rank)}), {plural(schedule.microbatches, 'microbatch')}"
    )


def _first_difference(schedule: Schedule, meant: Schedule, rank: int | None = None) -> str:
    """The first step that differs, in the list of this rank if it differs there."""
    if _sizes(schedule) != _sizes(meant):
        return f"it has {_sizes(schedule)}, and not {_sizes(meant)}"
    own, expected = (each.only(_PLAIN_KINDS).ranks for each in (schedule, meant))
    for each in [*([] if rank is None else [rank]), *range(schedule.num_ranks)]:
        actions = zip_longest(own[each], expected[each], fillvalue="the end")
        for number, (found, wanted) in enumerate(actions):
            if found != wanted:
                return f"rank {each}, step {number}: {found} instead of {wanted}"
    return "only in sharding or memory actions"


# Reads the folder that a run left behind: state files of Penstock, or dumps of torch's flight recorder.
#
# Files are recognized by their names (`rank3.json`, or `rank` or `trace` and a number at the end, such as
# `nccl_trace_rank_3`) and by what is in them. Pickles are read by a parser that knows plain values only:
# nothing in them is run.


_NAME = re.compile(r".*(?:rank|trace).*?(\d{1,8})(?:\.pipeline\d{1,8})?(?:\.(?:json|pkl|pickle))?", re.ASCII)
_LARGEST = 256 << 20  # bytes of a file
_OLD_SECONDS = 300


@dataclass(frozen=True)
class Evidence:
    """All pipelines of a folder, and sentences on what was left out."""

    pipelines: tuple[PipelineEvidence, ...]
    notes: tuple[str, ...]


def read_evidence(folder: Path, schedule: Schedule | None) -> Evidence:
    """Read all files of a folder; a `FormatError` lists the problems of all of them."""
    states: list[RankState] = []
    records: list[FlightRecord] = []
    problems: list[str] = []
    skipped: list[str] = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_file() or path.name.startswith("."):
            skipped.append(path.name)
            continue
        try:
            found = _read_file(path, int(match[1]))
        except FormatError as error:
            problems += [f"{path.name}: {problem}" for problem in error.problems]
            continue
        (states if isinstance(found, RankState) else records).append(found)  # type: ignore[arg-type]
    if problems:
        raise FormatError(str(folder), problems)
    if not states and not records:
        raise FormatError(
            str(folder), ["no state files (rank0.json, ...) and no dumps of torch's flight recorder here"]
        )
    notes = [f"not read: {some(skipped)}"] if skipped else []
    if states:
        notes += [
            f"{plural(len(records), 'dump')} of the flight recorder not used: there are state files"
        ] * bool(records)
        return Evidence(_pipelines(states, notes), tuple(notes))
    if schedule is None:
        problem = f"{folder}: a flight record has no schedule: give the schedule of the run as "
        raise ScheduleError(problem, Parameter("schedule"))
    return Evidence(tuple(align_records(records, schedule)), tuple(notes))


def _read_file(path: Path, rank: int) -> RankState | FlightRecord:
    source = path.name
    if path.stat().st_size > _LARGEST:
        raise FormatError(source, [f"larger than {_LARGEST >> 20} MiB, which no dump of a rank is"])
    content = path.read_bytes()
    try:
        document = unpickle_plain(content) if content[:1] == b"\x80" else json.loads(content)
    except PickleRefusedError as error:
        problem = f"not a dump of the flight recorder: {error}; nothing in it was run"
        raise FormatError(source, [problem]) from None
    except (ValueError, RecursionError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)
        problem = f"neither JSON nor a pickle: {why}" if content else "the file is empty"
        raise FormatError(source, [problem]) from None
    if isinstance(document, dict) and document.get("format") == STATE_FORMAT:
        return load_state(document, source)
    if isinstance(document, dict) and is_flight_record(document):
        return load_flight_record(document, rank, source)
    raise FormatError(source, ["neither a state file of Penstock nor a dump of torch's flight recorder"])


def _pipelines(states: Sequence[RankState], notes: list[str]) -> tuple[PipelineEvidence, ...]:
    """The states of the newest launch, by pipeline; of several of one rank, the one that is inside a step."""
    newest = max(states, key=lambda state: state.written_at)
    if old := [state.source for state in states if state.job != newest.job]:
        notes.append(f"left out, from another launch of the job: {some(old)}")
    kept = [state for state in states if state.job == newest.job]
    if late := [state.source for state in kept if newest.written_at - state.written_at > _OLD_SECONDS]:
        notes.append(
            f"more than {_OLD_SECONDS} s older than the newest state, and perhaps outdated: {some(late)}"
        )
    groups: dict[tuple[int, ...], dict[int, RankState]] = {}
    for state in sorted(kept, key=lambda state: (state.runs, state.written_at)):
        groups.setdefault(state.members, {})[state.rank] = state
    return tuple(
        PipelineEvidence(members, tuple(by_rank[rank] for rank in sorted(by_rank)))
        for members, by_rank in sorted(groups.items())
    )


KINDS = {
    "exception": "raised an exception",
    "another-schedule": "runs another schedule",
    "network": "do not reach each other",
    "skipped-send": "skipped a send",
    "shape-mismatch": "sends or expects a tensor of another shape",
    "died": "has died",
    "stopped": "does not answer",
    "no-state": "left no state",
    "never-arrived": "has not arrived",
    "computing": "is still in an action",
    "collective": "waits in a collective",
    "transfer": "are in a transfer that does not end",
    "deadlock": "wait for each other",
}
"""What a culprit did, from the strongest evidence to the weakest."""


@dataclass(frozen=True)
class Finding:
    """A culprit; `ranks` are several only for a cycle, or for two ends of one message."""

    kind: str
    ranks: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} {KINDS[self.kind]}"
        several = "disagree about the shape of a tensor" if self.kind == "shape-mismatch" else KINDS[self.kind]
        return f"ranks {' and '.join(map(str, self.ranks))} {several}"


@dataclass(frozen=True)
class Diagnosis:
    """The result for one pipeline."""

    members: tuple[int, ...]
    schedule: Schedule
    """The schedule that the positions are in, with its messages."""
    states: Mapping[int, RankState]
    waits: Mapping[int, Wait]
    findings: tuple[Finding, ...]
    """The culprit first; empty if no rank waits."""
    notes: tuple[Message, ...] = ()

    @property
    def culprit(self) -> Finding | None:
        """The finding that explains the hang."""
        return self.findings[0] if self.findings else None


def diagnose(evidence: PipelineEvidence, given: Schedule | None = None) -> Diagnosis:
    """Find the culprit; `given` is the schedule that all ranks were meant to run."""
    states = {state.rank: state for state in evidence.states}
    reference, notes = _reference(evidence.states, given)
    found = {rank: _wait(state, states, reference) for rank, state in states.items() if state.awaits}
    waits = {rank: wait for rank, wait in found.items() if wait is not None}
    findings = [
        Finding("exception", (rank,), f"in {state.action or state.mode}: {state.error}")
        for rank, state in states.items()
        if state.is_origin and state.error
    ]
    findings += [Finding("another-schedule", (rank,), text) for rank, text in evidence.differences.items()]
    others = (
        _difference(state, reference) for rank, state in states.items() if rank not in evidence.differences
    )
    findings += [each for each in others if each is not None]
    findings += (network := _unreached(states, evidence.members))
    apart = {rank for finding in network for rank in finding.ranks}
    for finding in _ends_of_waits(states, waits, evidence.members):
        if finding.kind not in ("skipped-send", "transfer") or not apart.issuperset(finding.ranks):
            findings.append(finding)
    named = {rank for finding in findings for rank in finding.ranks}
    silent = [rank for rank in range(len(evidence.members)) if rank not in states and rank not in named]
    findings += [_missing(rank, states, evidence.members, None) for rank in silent]
    order = list(KINDS)
    findings.sort(key=lambda finding: order.index(finding.kind))
    once = {(finding.kind, finding.ranks): finding for finding in reversed(findings)}
    kept = tuple(reversed(once.values()))
    return Diagnosis(evidence.members, reference, states, waits, kept, tuple(notes))


def _unreached(states: Mapping[int, RankState], members: Sequence[int]) -> list[Finding]:
    """Ranks that run, as their states show, and that miss the heartbeats of each other."""
    missed = {
        rank: [other for other in states if (lost := state.lost.get(members[other])) and lost.is_silent]
        for rank, state in states.items()
    }
    pairs = [(rank, other) for rank in missed for other in missed[rank] if rank in missed.get(other, ())]
    if not pairs:
        return []
    ranks = tuple(sorted({rank for rank, _ in pairs}))
    texts = [f"rank {rank} misses rank {listed(sorted(missed[rank]))}" for rank in ranks]
    text = f"each of them has a state, and {'; '.join(texts)}: the network between them fails"
    return [Finding("network", ranks, text)]


def _ends_of_waits(
    states: Mapping[int, RankState], waits: Mapping[int, Wait], members: Sequence[int]
) -> list[Finding]:
    """What the waits of all ranks lead to; that of the most ranks first."""
    found: Counter[Finding] = Counter()
    for rank in states:
        if rank in waits:
            found[_follow(rank, states, waits, members)] += 1
        elif states[rank].runs and states[rank].waiting_for:
            found[Finding("collective", (rank,), f"it waits for {states[rank].waiting_for}")] += 0
    culprits = {finding: count for finding, count in found.items() if finding.kind != "collective" or not waits}
    return sorted(culprits, key=lambda finding: -culprits[finding])


def _follow(
    rank: int, states: Mapping[int, RankState], waits: Mapping[int, Wait], members: Sequence[int]
) -> Finding:
    """Follow the waits from this rank to their end."""
    path = [rank]
    while (wait := waits.get(path[-1])) is not None:
        if (mismatch := _shape_mismatch(wait, states)) is not None:
            return mismatch
        if wait.peer == "missing":
            return _missing(wait.for_rank, states, members, wait)
        if wait.peer == "behind":
            return _behind(states[wait.for_rank], wait)
        if wait.peer in ("passed", "not in its list") and wait.is_receive:
            return _skipped(states[wait.for_rank], wait)
        mutual = waits.get(wait.for_rank)
        if mutual is not None and mutual.message == wait.counterpart:
            text = (
                f"both are at this message, {wait.message} and {wait.counterpart}: the link between them fails"
            )
            return Finding("transfer", tuple(sorted((wait.rank, wait.for_rank))), text)
        if wait.for_rank in path:
            return _cycle(path[path.index(wait.for_rank) :], waits)
        path.append(wait.for_rank)
    return _last(states[path[-1]])


def _last(state: RankState) -> Finding:
    """A rank that others wait for, and that waits for no message."""
    if state.runs and state.waiting_for:
        return Finding("collective", (state.rank,), f"it waits for {state.waiting_for}")
    if not state.runs:
        return Finding("never-arrived", (state.rank,), f"{_outside(state)}{_stack(state)}")
    where = f"it is in {state.action}" if state.action else "it is before the first action of its list"
    if state.position >= len(state.steps):
        where = "it has finished its list"
    return Finding("computing", (state.rank,), f"{where}, and waits for no message{_stack(state)}")


def _outside(state: RankState) -> str:
    if state.mode == "connecting":
        return "it is still connecting"
    where = "neither in step nor in eval" if state.mode == "outside" else f"in {state.mode}"
    return f"it is {where}, after step {state.step_number}"


def _stack(state: RankState) -> str:
    calls = state.stacks.get("MainThread", ())
    return f"; its main thread is in {calls[0]}" if calls else ""


def _behind(state: RankState, wait: Wait) -> Finding:
    where = _outside(state) if not state.runs else f"it is in {state.name}"
    text = f"rank {wait.rank} waits for {wait.message}, and {where}{_stack(state)}"
    return Finding("never-arrived", (state.rank,), text)


def _skipped(state: RankState, wait: Wait) -> Finding:
    waiting = f"rank {wait.rank} waits for {wait.message}"
    if wait.peer == "not in its list":
        return Finding("skipped-send", (state.rank,), f"its list has no {wait.counterpart}, and {waiting}")
    place = f"its list has {wait.counterpart} as step {wait.position}"
    at = f"it is at step {state.position} ({state.action})" if state.action else "it has finished the step"
    empty = [name for name, tensors in state.messages.items() if not tensors and name in state.steps]
    without = f"; there was no tensor in its {listed(empty)}" if empty else ""
    return Finding("skipped-send", (state.rank,), f"{place} and {at}, but {waiting}{without}")


def _shape_mismatch(wait: Wait, states: Mapping[int, RankState]) -> Finding | None:
    """Whether both ends of the message know its tensors, and disagree."""
    peer = states.get(wait.for_rank)
    if peer is None or wait.peer not in ("there", "passed"):
        return None
    mine = states[wait.rank].messages.get(str(wait.message))
    theirs = peer.messages.get(str(wait.counterpart))
    if not mine or not theirs or mine == theirs:
        return None
    ends = {wait.message: (wait.rank, mine), wait.counterpart: (wait.for_rank, theirs)}
    send, receive = sorted(ends, key=lambda action: not action.kind.is_send)
    sender, sent = ends[send]
    receiver, expected = ends[receive]
    odd = [
        rank for action, (rank, tensors) in ends.items() if _usual(states[rank], action) not in (None, tensors)
    ]
    text = (
        f"rank {sender} has {listed(sent)} in {send}, rank {receiver} expects {listed(expected)} in {receive}"
    )
    return Finding("shape-mismatch", tuple(odd) if len(odd) == 1 else tuple(sorted((sender, receiver))), text)


def _usual(state: RankState, action: Action) -> tuple[str, ...] | None:
    """The tensors of the other messages of this kind and stage, if there are some that all are alike."""
    prefix = f"{action.stage}{action.kind}"
    messages = state.messages.items()
    others = {tensors for name, tensors in messages if name.startswith(prefix) and name != str(action)}
    return next(iter(others)) if len(others) == 1 else None


def _missing(rank: int, states: Mapping[int, RankState], members: Sequence[int], wait: Wait | None) -> Finding:
    """A rank that wrote no state; others may know more of it."""
    world_rank = members[rank]
    known = [(state.rank, state.lost[world_rank]) for state in states.values() if world_rank in state.lost]
    waiting = f"; rank {wait.rank} waits for its {wait.counterpart}" if wait is not None else ""
    if known:
        observer, lost = known[0]
        kind = "stopped" if lost.is_silent else "died"
        return Finding(kind, (rank,), f"it left no state, and rank {observer} says: {lost.text}{waiting}")
    text = "its process was killed or is stopped, or it was not asked for its state"
    return Finding("no-state", (rank,), f"{text}{waiting}")


def _cycle(ranks: Sequence[int], waits: Mapping[int, Wait]) -> Finding:
    first = min(range(len(ranks)), key=lambda index: ranks[index])
    ordered = [*ranks[first:], *ranks[:first]]
    steps = [
        f"rank {rank} waits for {waits[rank].message} from rank {waits[rank].for_rank}" for rank in ordered
    ]
    return Finding("deadlock", tuple(ordered), "; ".join(steps))
