"""The state of one rank of a pipeline, and its file: the schedule it runs, where it is, and what it waits for.

{"format": "penstock-rank-state", "version": 4, "runtime": "penstock", "members": [0, 1], "world_rank": 1,
 "mode": "step", "step_number": 12, "call_number": 14, "position": 7, "awaits": "1RECV_F2",
 "waiting_for": {"kind": "receive", "what": "the losses", "peer": 1}, "schedule": {...}, ...}

A rank writes it when a step fails, when it makes no progress, or on a signal; `penstock diagnose` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from penstock.arguments import plural, printable
from penstock.errors import FormatError
from penstock.formats import dumps, reads
from penstock.ir.schedule import Schedule

STATE_FORMAT = "penstock-rank-state"
_VERSION = 4
_LONGEST = 10_000  # characters of a text
_MOST = (1 << 26) - 1  # of any number
_CONTEXT = 3  # steps shown before and after the current one


class WaitKind(str, Enum):
    """What kind of wait a `Wait` is."""

    RECEIVE = "receive"
    """For a message of a peer."""
    SEND = "send"
    """Until a peer receives a message."""
    COMMIT = "commit"
    """For a peer to finish the step."""
    CALL = "call"
    """For other ranks to begin the same call."""
    COLLECTIVE = "collective"
    """For other ranks in a collective."""

    __str__ = str.__str__


_BEFORE_PEER = {
    WaitKind.RECEIVE: "from",
    WaitKind.SEND: "to be received by",
    WaitKind.COMMIT: "on",
    WaitKind.CALL: "of",
    WaitKind.COLLECTIVE: "with",
}


@dataclass(frozen=True)
class Wait:
    """What a rank waits for; `peer` is the one rank of the pipeline that it waits for, if there is one."""

    kind: WaitKind
    what: str
    peer: int | None = None

    def __str__(self) -> str:
        return self.what if self.peer is None else f"{self.what} {_BEFORE_PEER[self.kind]} rank {self.peer}"

    @classmethod
    def load(cls, keys: Mapping[str, Any] | None) -> Wait | None:
        """Return the wait with the keys of `asdict`; None for None."""
        return None if keys is None else cls(WaitKind(keys["kind"]), keys["what"], keys["peer"])


@dataclass(frozen=True)
class LostRank:
    """What a rank knows of another one whose process has ended, or that does not answer."""

    is_silent: bool
    """Whether nobody knows that its process has ended: it may run, and the network fails."""
    text: str


@dataclass(frozen=True)
class RankState:
    """What one rank of one pipeline did when its state was written."""

    members: tuple[int, ...]
    """The world ranks of the pipeline."""
    world_rank: int
    schedule: Schedule
    """The schedule that this rank runs, with its communication."""
    mode: str = "step"
    """`step`, `eval`, `connecting`, the name of a collective, or `outside` if it runs none of them."""
    step_number: int = 0
    """The number of its current or last step; an eval has that of the step before it."""
    call_number: int = 0
    """The number of its current or last call of step and eval: by it ranks are ahead of each other."""
    position: int = -1
    """Its step in its list: -1 before the first, the length of the list after the last."""
    awaits: str = ""
    """The SEND or RECV that it waits for."""
    waiting_for: Wait | None = None
    """What it waits for, if that is no message of the schedule."""
    error: str = ""
    """The exception that it raised, or the failure that it was told of."""
    is_origin: bool = False
    """Whether the error began on this rank."""
    lost: Mapping[int, LostRank] = field(default_factory=dict)
    """By world rank: the ranks that ended or are silent."""
    messages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The tensors of the messages of this step, where the runtime knows them: `0SEND_F1: float32 [2, 8]`."""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The innermost calls of each thread, first the innermost."""
    runtime: str = "penstock"
    pipeline: int = 0
    """The number of the pipeline in its process, in the order of creation."""
    process: str = ""
    job: str = ""
    """The launch that the process belongs to; states of other launches are left out."""
    reason: str = ""
    """Why the state was written."""
    written_at: float = 0.0
    """Seconds since 1970."""
    source: str = ""
    """The file that it was read from."""

    @property
    def rank(self) -> int:
        """The rank in the pipeline."""
        return self.members.index(self.world_rank)

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The rank's list as texts."""
        return tuple(map(str, self.schedule.ranks[self.rank]))

    @property
    def runs(self) -> bool:
        """Whether it is inside a step or eval."""
        return self.mode in ("step", "eval")

    @property
    def name(self) -> str:
        """What it is inside, in words."""
        return f"the eval after step {self.step_number}" if self.mode == "eval" else f"step {self.step_number}"

    @property
    def action(self) -> str:
        """The step of its list that it is at; empty before the first and after the last."""
        return self.steps[self.position] if self.runs and 0 <= self.position < len(self.steps) else ""


def state_file_name(state: RankState) -> str:
    """The name of its file: `rank3.json`; the further pipelines of a process have their number in it."""
    return f"rank{state.world_rank}" + (f".pipeline{state.pipeline}" if state.pipeline else "") + ".json"


def excerpt(steps: tuple[object, ...], position: int) -> str:
    """The steps around the current one, which is in brackets."""
    if position < 0:
        return "[not started] " + " ".join(map(str, steps[:_CONTEXT])) + " ..." * (len(steps) > _CONTEXT)
    if position >= len(steps):
        return "... " + " ".join(map(str, steps[-_CONTEXT:])) + " [finished]"
    first, last = max(position - _CONTEXT, 0), position + _CONTEXT + 1
    cells = [f"[{step}]" if first + i == position else str(step) for i, step in enumerate(steps[first:last])]
    return "... " * (first > 0) + " ".join(cells) + " ..." * (last < len(steps))


def dump_state(state: RankState) -> str:
    """The state as JSON."""
    document = asdict(state, dict_factory=lambda pairs: {key: value for key, value in pairs if key != "source"})
    schedule = json.loads(dumps(state.schedule, "json"))
    return json.dumps({"format": STATE_FORMAT, "version": _VERSION, **document, "schedule": schedule}) + "\n"


def load_state(document: Mapping[str, Any], source: str) -> RankState:
    """The state in a parsed JSON object; `source` names it in error messages."""
    problems = [] if document.get("version") == _VERSION else [f"version: expected {_VERSION}"]
    unknown = document.keys() - _FIELDS.keys() - {"format", "version", "schedule"}
    problems += [f"{printable(str(key))}: unknown key" for key in document if key in unknown]
    for key, (accepts, words) in _FIELDS.items():
        if key not in document:
            problems.append(f"{key}: missing; expected {words}")
        elif not accepts(document[key]):
            problems.append(f"{key}: expected {words}")
    if problems:
        raise FormatError(source, problems)
    schedule = reads(json.dumps(document.get("schedule")), "json", source=f"{source}: schedule")
    values = {key: document[key] for key in _FIELDS}
    values["members"] = tuple(values["members"])
    values["waiting_for"] = Wait.load(values["waiting_for"])
    values["lost"] = {int(rank): LostRank(**keys) for rank, keys in values["lost"].items()}
    for key in ("messages", "stacks"):
        values[key] = {name: tuple(texts) for name, texts in values[key].items()}
    if values["world_rank"] not in values["members"] or len(values["members"]) != schedule.num_ranks:
        ranks = plural(schedule.num_ranks, "rank")
        problem = f"members: expected {ranks} as in the schedule, and world_rank among them"
        raise FormatError(source, [problem])
    return RankState(schedule=schedule, source=source, **values)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_number(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _MOST


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object, **checks: Callable[[Any], bool]) -> bool:
    """Whether this is an object with exactly these keys, and each value passes its check."""
    fits = isinstance(value, dict) and value.keys() == checks.keys()
    return fits and all(check(value[key]) for key, check in checks.items())  # type: ignore[index]


def _is_wait(value: object) -> bool:
    return value is None or _is_object(
        value,
        kind=lambda kind: kind in list(WaitKind),
        what=_is_text,
        peer=lambda peer: peer is None or _is_number(peer),
    )


def _is_rank(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 9


def _is_lost(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_rank(rank) and _is_object(lost, is_silent=_is_flag, text=_is_text) for rank, lost in value.items()
    )


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(texts, list) and all(map(_is_text, texts)) for texts in value.values()
    )


_TEXT = (_is_text, f"a text of at most {_LONGEST} characters")
_NUMBER = (_is_number, "a number of at least 0")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "members": (
        lambda x: isinstance(x, list) and all(map(_is_number, x)) and len(set(x)) == len(x),
        "a list of different world ranks",
    ),
    "world_rank": _NUMBER,
    "mode": _TEXT,
    "step_number": _NUMBER,
    "call_number": _NUMBER,
    "position": (lambda x: _is_number(x, -1), "a number of at least -1"),
    "awaits": _TEXT,
    "waiting_for": (_is_wait, "null, or an object with kind, what and peer"),
    "error": _TEXT,
    "is_origin": (_is_flag, "true or false"),
    "lost": (_is_lost, "objects with is_silent and text by world rank"),
    "messages": (_is_table, "lists of texts by action"),
    "stacks": (_is_table, "lists of texts by thread"),
    "runtime": _TEXT,
    "pipeline": _NUMBER,
    "process": _TEXT,
    "job": _TEXT,
    "reason": _TEXT,
    "written_at": (lambda x: isinstance(x, int | float) and not isinstance(x, bool), "seconds since 1970"),
}
"""Per key of a file: a check of its value, and the words for what is expected."""
