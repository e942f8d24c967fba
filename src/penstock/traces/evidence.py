"""Reads the folder that a run left behind: state files of Penstock, or dumps of torch's flight recorder.

Files are recognized by their names (`rank3.json`, or `rank` or `trace` and a number at the end, such as
`nccl_trace_rank_3`) and by what is in them. Pickles are read by a parser that knows plain values only: nothing
in them is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import plural, some
from penstock.errors import FormatError, ScheduleError
from penstock.formats.restricted_pickle import PickleRefusedError, unpickle_plain
from penstock.ir.schedule import Schedule
from penstock.traces.flight_recorder import FlightRecord, is_flight_record, load_flight_record
from penstock.traces.message_alignment import align_records
from penstock.traces.rank_state import STATE_FORMAT, RankState, load_state

__all__ = ["Evidence", "PipelineEvidence", "read_evidence"]

_NAME = re.compile(r".*(?:rank|trace).*?(\d{1,8})(?:\.pipeline\d{1,8})?(?:\.(?:json|pkl|pickle))?", re.ASCII)
_LARGEST = 256 << 20  # bytes of a file
_OLD_SECONDS = 300


@dataclass(frozen=True)
class PipelineEvidence:
    """What is known of the ranks of one pipeline."""

    members: tuple[int, ...]
    states: tuple[RankState, ...]
    differences: Mapping[int, str]
    """The ranks whose operations are not those of the schedule, where a flight record shows it."""


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
        problem = f"{folder}: a flight record has no schedule: give that of the run as --schedule"
        raise ScheduleError(problem, argument="schedule")
    aligned = align_records(records, schedule)
    return Evidence(
        tuple(PipelineEvidence(each.states[0].members, each.states, each.differences) for each in aligned),
        tuple(notes),
    )


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
        PipelineEvidence(members, tuple(by_rank[rank] for rank in sorted(by_rank)), {})
        for members, by_rank in sorted(groups.items())
    )
