"""The events of a job that the watch reports: a message, the end of a process, a second that has passed."""

from __future__ import annotations

from typing import Any, Protocol

_LARGEST = 2**53
_NUMBER_OR_NONE = int, type(None)
_CAUSE = {
    **dict.fromkeys(["rank", "step", "world_rank", "reporter"], int),
    **dict.fromkeys(["action", "message", "details", "process", "call", "place"], str),
    **dict.fromkeys(["stage", "microbatch"], _NUMBER_OR_NONE),
    "kind": {"exception", "timeout", "lost", "interrupted"},
    "members": [int],
}
_STATUS = {"mode": str, "step": int, "position": int, "awaited": str, "call": str}
_QUESTION = {"question": str, "rank": int, "group": [int]}
_SHAPES: dict[str, dict[str, Any]] = {
    "aborted": {"rank": int},
    "answer": {"question": str, "rank": int, "text": str},
    "broken": {**_QUESTION, "connection": str},
    "cause": {"connection": str, "cause": _CAUSE},
    "end": {"rank": int, "process": str, "reason": str, "network_error": str},
    "silence": {"rank": int, "process": str, "seconds": float},
    "state": {"rank": int},
    "status": {"connection": str, "rank": int, "status": _STATUS},
    "unmet": {**_QUESTION, "stages": str, "seconds": float, "are_replicas": bool},
    "withdrawn": {"rank": int, "stages": str},
}
"""The fields of each type of message: a type or several, a set of values, a list, or an object."""


class Ended:
    """How the process of a rank ended; `process` names it, `reason` is empty if it said nothing.

    With `network_error` the network gave up the connection to it, and nobody knows whether the process runs.
    """

    def __init__(self, rank: int, process: str, reason: str, network_error: str = "") -> None:
        self.rank, self.process, self.reason, self.network_error = rank, process, reason, network_error

    @property
    def verb(self) -> str:
        """What the rank does, to follow its name."""
        return "does not answer" if self.network_error else "has ended"

    def __str__(self) -> str:
        if self.network_error:
            error = self.network_error
            return (
                f"the connection to its process ({self.process}) broke ({error}): its host or the network fails"
            )
        how = f"has ended: {self.reason}" if self.reason else "ended without a message: killed, or crashed"
        return f"its process ({self.process}) {how}"


def end_message(ended: Ended) -> dict[str, Any]:
    """The broadcast that says so."""
    return {"type": "end", "id": f"{ended.rank}/end", **vars(ended)}


def check_message(message: dict[str, Any]) -> None:
    """Raise a ValueError unless a message has a known type, and the fields of that type."""
    kind = message.get("type")
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    fields = {name: value for name, value in message.items() if name not in ("type", "id")}
    if shape is None or not _fits(fields, shape) or not isinstance(message.get("id", ""), str):
        raise ValueError("not a message of this version")


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        is_object = isinstance(value, dict) and value.keys() == shape.keys()
        return is_object and all(_fits(value[name], shape[name]) for name in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, set):
        return isinstance(value, str) and value in shape
    if type(value) in (int, float) and not -_LARGEST < value < _LARGEST:  # nor NaN
        return False
    if shape is float:
        return type(value) in (int, float)
    return type(value) in (shape if isinstance(shape, tuple) else (shape,))  # True is no int


class Listener(Protocol):
    """Receives the events of the job, on the thread of the watch."""

    def on_message(self, message: dict[str, Any]) -> None:
        """A message from another rank."""

    def on_end(self, ended: Ended) -> None:
        """The process of another rank has ended."""

    def on_beat(self) -> None:
        """A second has passed."""
