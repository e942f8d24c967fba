"""Why a pipeline hangs: where each rank is, who waits for whom, and which rank is the culprit.

Each wait is followed to the rank at its other end, until a rank is reached that waits for nobody, has no state,
or claims to have sent what did not arrive. Where the waits close a cycle, the schedule itself deadlocks.

    rank 0 at 0B0  -- waits for 0RECV_B0 -->  rank 1 at 1F2  -- waits for 1RECV_F2 -->  rank 0 is past 0SEND_F2
                                                                                       culprit: rank 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.arguments import listed
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.traces.evidence import PipelineEvidence
from penstock.traces.rank_state import RankState
from penstock.traces.schedule_differences import difference_of, reference_of
from penstock.traces.waits import Wait, find_waits

__all__ = ["KINDS", "Diagnosis", "Finding", "diagnose"]

KINDS = {
    "exception": "raised an exception",
    "another-schedule": "runs another schedule",
    "network": "does not reach another rank",
    "skipped-send": "skipped a send",
    "shape-mismatch": "sends or expects a tensor of another shape",
    "died": "has died",
    "stopped": "does not answer",
    "no-state": "left no state",
    "never-arrived": "has not arrived",
    "computing": "is still in an action",
    "collective": "waits in a collective",
    "transfer": "is in a transfer that does not end",
    "deadlock": "waits in a cycle",
}
"""What a culprit did, from the strongest evidence to the weakest."""


@dataclass(frozen=True)
class Finding:
    """A culprit; `ranks` are several only for a cycle, or for two ends of one message."""

    kind: str
    ranks: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        name = "rank" if len(self.ranks) == 1 else "ranks"
        verb = KINDS[self.kind] if len(self.ranks) == 1 else _PLURAL.get(self.kind, KINDS[self.kind])
        return f"{name} {' and '.join(map(str, self.ranks))} {verb}"


_PLURAL = {
    "another-schedule": "run another schedule",
    "network": "do not reach each other",
    "shape-mismatch": "disagree about the shape of a tensor",
    "transfer": "are in a transfer that does not end",
    "deadlock": "wait for each other",
}


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
    notes: tuple[str, ...] = ()

    @property
    def culprit(self) -> Finding | None:
        """The finding that explains the hang."""
        return self.findings[0] if self.findings else None


def diagnose(evidence: PipelineEvidence, given: Schedule | None = None) -> Diagnosis:
    """Find the culprit; `given` is the schedule that all ranks were meant to run."""
    states = {state.rank: state for state in evidence.states}
    reference, notes = reference_of(evidence.states, given)
    waits = find_waits(states, reference)
    findings = [*_exceptions(states), *_other_schedules(states, reference, evidence.differences)]
    findings += (network := _unreached(states, evidence.members))
    apart = {rank for finding in network for rank in finding.ranks}
    for finding in _ends_of_waits(states, waits, evidence.members):
        if finding.kind not in ("skipped-send", "transfer") or not apart.issuperset(finding.ranks):
            findings.append(finding)
    findings += _without_state(states, evidence.members, findings)
    order = list(KINDS)
    findings.sort(key=lambda finding: order.index(finding.kind))
    once = {(finding.kind, finding.ranks): finding for finding in reversed(findings)}
    kept = tuple(reversed(once.values()))
    return Diagnosis(evidence.members, reference, states, waits, kept, tuple(notes))


def _exceptions(states: Mapping[int, RankState]) -> list[Finding]:
    return [
        Finding("exception", (rank,), f"in {state.action or state.mode}: {state.error}")
        for rank, state in states.items()
        if state.is_origin and state.error
    ]


def _other_schedules(
    states: Mapping[int, RankState], reference: Schedule, known: Mapping[int, str]
) -> list[Finding]:
    findings = [Finding("another-schedule", (rank,), text) for rank, text in known.items()]
    for rank, state in states.items():
        if rank not in known and (difference := difference_of(state, reference)) is not None:
            findings.append(Finding(difference.kind, (rank,), difference.message))
    return findings


def _unreached(states: Mapping[int, RankState], members: Sequence[int]) -> list[Finding]:
    """Ranks that run, as their states show, and that miss the heartbeats of each other."""
    missed = {
        rank: [other for other in states if _is_silence(state.lost.get(members[other], ""))]
        for rank, state in states.items()
    }
    pairs = [(rank, other) for rank in missed for other in missed[rank] if rank in missed.get(other, ())]
    if not pairs:
        return []
    ranks = tuple(sorted({rank for rank, _ in pairs}))
    texts = [f"rank {rank} misses rank {listed(sorted(missed[rank]))}" for rank in ranks]
    text = f"each of them has a state, and {'; '.join(texts)}: the network between them fails"
    return [Finding("network", ranks, text)]


def _is_silence(text: str) -> bool:
    """Whether the text about a lost rank says that it is not reached, and not that its process has ended."""
    return "heartbeat" in text or "the network fails" in text


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
    return f"it is {where}, after step {state.step}"


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
    mine, theirs = states[wait.rank].messages.get(wait.message), peer.messages.get(wait.counterpart)
    if not mine or not theirs or mine == theirs:
        return None
    ends = {wait.message: (wait.rank, mine), wait.counterpart: (wait.for_rank, theirs)}
    send, receive = sorted(ends, key=lambda action: "RECV" in action)
    sender, sent = ends[send]
    receiver, expected = ends[receive]
    odd = [
        rank for action, (rank, tensors) in ends.items() if _usual(states[rank], action) not in (None, tensors)
    ]
    text = (
        f"rank {sender} has {listed(sent)} in {send}, rank {receiver} expects {listed(expected)} in {receive}"
    )
    return Finding("shape-mismatch", tuple(odd) if len(odd) == 1 else tuple(sorted((sender, receiver))), text)


def _usual(state: RankState, action: str) -> tuple[str, ...] | None:
    """The tensors of the other messages of this kind and stage, if there are some that all are alike."""
    kind = next(kind.value for kind in Kind if kind.is_communication and kind.value in action)
    prefix = action[: action.index(kind)] + kind
    others = {tensors for name, tensors in state.messages.items() if name.startswith(prefix) and name != action}
    return next(iter(others)) if len(others) == 1 else None


def _missing(rank: int, states: Mapping[int, RankState], members: Sequence[int], wait: Wait | None) -> Finding:
    """A rank that wrote no state; others may know more of it."""
    world_rank = members[rank]
    known = [(state.rank, state.lost[world_rank]) for state in states.values() if world_rank in state.lost]
    waiting = f"; rank {wait.rank} waits for its {wait.counterpart}" if wait is not None else ""
    if known:
        observer, text = known[0]
        kind = "stopped" if _is_silence(text) else "died"
        return Finding(kind, (rank,), f"it left no state, and rank {observer} says: {text}{waiting}")
    text = "its process was killed or is stopped, or it was not asked for its state"
    return Finding("no-state", (rank,), f"{text}{waiting}")


def _without_state(
    states: Mapping[int, RankState], members: Sequence[int], findings: Sequence[Finding]
) -> list[Finding]:
    """The ranks without a state that no finding names yet."""
    named = {rank for finding in findings for rank in finding.ranks}
    missing = [rank for rank in range(len(members)) if rank not in states and rank not in named]
    return [_missing(rank, states, members, None) for rank in missing]


def _cycle(ranks: Sequence[int], waits: Mapping[int, Wait]) -> Finding:
    first = min(range(len(ranks)), key=lambda index: ranks[index])
    ordered = [*ranks[first:], *ranks[:first]]
    steps = [
        f"rank {rank} waits for {waits[rank].message} from rank {waits[rank].for_rank}" for rank in ordered
    ]
    return Finding("deadlock", tuple(ordered), "; ".join(steps))
