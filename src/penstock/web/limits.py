"""The limits of one request: what it may ask for, how long it may take, how much memory it may use."""

from __future__ import annotations

from typing import NamedTuple

MAX_SCHEDULES = 8
"""In one request."""
MAX_WORK = 1 << 15
"""Stages times microbatches of a schedule: 32 ranks with 2 stages each and 512 microbatches."""
MAX_STEPS = 8 * MAX_WORK
"""Of a schedule, messages and collectives included."""
MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request; traces are large."""


class Limit(NamedTuple):
    """Of one kind of request."""

    seconds: float = 15.0
    body: int = 8 * 1024 * 1024
    """Bytes."""
    memory: int = 3 * 1024**3
    """Bytes of writable memory that the worker may add to what it has when the request begins."""


LIMITS = {
    "compare": Limit(),
    "edit": Limit(10.0),
    "robustness": Limit(30.0),
    "pareto": Limit(30.0),
    "export": Limit(30.0),
    "search": Limit(150.0, memory=6 * 1024**3),
    "trace": Limit(60.0, body=MAX_BODY),
}
"""By the name of the request."""
