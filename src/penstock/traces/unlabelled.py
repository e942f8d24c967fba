"""Actions from operators alone: torch's 1F1B has no ranges, but what runs tells forwards from backwards.

    operators   recv_  mm  gelu  mm  send  recv_  evaluate_function: ...  send  recv_  mm ...
    runs               F                          B                             F

Operators of one kind between messages are a run. Backward operators have the sequence numbers of the forward
operators that made their graph, so each backward names its forward; other operators (the optimizer, splitting a
batch) belong to no backward and are left out.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import TraceError
from penstock.ir.action import Action, Kind
from penstock.ir.table import Ints
from penstock.traces.recorded import Recorded

__all__ = ["Operators"]

_FORWARD, _BACKWARD, _MESSAGE = range(3)
_EVALUATION = "autograd::engine::evaluate_function"
_MESSAGES = ("c10d::send", "c10d::recv_")
_SPLIT = "aten::tensor_split"
"""With it a schedule splits the batch into microbatches, directly before the first of them."""


class _Run(NamedTuple):
    """Consecutive operators of one kind."""

    kind: int
    start: int
    """When the message or run before it ended."""
    end: int
    numbers: Ints
    """The sequence numbers of its operators."""
    starts: Ints


class Operators:
    """The operators of one thread: kind, start, end and sequence number of each, as columns."""

    def __init__(self) -> None:
        self._columns = [array("q") for _ in range(4)]
        self._splits: list[int] = []

    def add(self, name: str, start: int, end: int, event: dict[str, Any]) -> None:
        """Add an operator of the host."""
        kind = _FORWARD
        if name in _MESSAGES:
            kind = _MESSAGE
        elif name.startswith(_EVALUATION):
            kind = _BACKWARD
        elif name == _SPLIT:
            self._splits.append(end)
        args = event.get("args")
        number = args.get("Sequence number") if isinstance(args, dict) else None
        known = isinstance(number, int) and abs(number) < 1 << 62
        self._append(kind, start, end, number if known and isinstance(number, int) else -1)

    def add_wait(self, end: int) -> None:
        """Add the end of a wait for a message."""
        self._append(_MESSAGE, end, end, -1)

    def _append(self, *values: int) -> None:
        for column, value in zip(self._columns, values):
            column.append(value)

    @property
    def messages(self) -> tuple[int, int]:
        """How many operators are about messages, and how many there are."""
        return self._columns[0].count(_MESSAGE), len(self._columns[0])

    def actions(self, name: str) -> list[Recorded]:
        """F and B in order; microbatches are numbered through all steps, in the order of the forwards."""
        forwards, backwards = self._pairs()
        if not backwards:
            problem = (
                f"{name}: no range PP:... or Forward ..., and no backward after a message: record a "
                "training step of torch.distributed.pipelining or of Penstock"
            )
            raise TraceError([problem])
        found = [
            Recorded(Action(kind, 0, number), start, end)
            for kind, runs in ((Kind.F, forwards), (Kind.B, backwards))
            for number, (start, end) in enumerate(runs)
        ]
        return sorted(found, key=lambda each: each.start)

    def _pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Start and end of each backward and of the forward that made its graph, in order of the forwards."""
        runs = self._runs()
        owner = {
            int(number): index
            for index, run in enumerate(runs)
            if run.kind == _FORWARD
            for number in run.numbers[run.numbers >= 0]
        }
        backward_of: dict[int, int] = {}
        made: dict[int, int] = {}
        for index, run in enumerate(runs):
            known = [int(number) for number in run.numbers if int(number) in owner]
            if run.kind == _BACKWARD and known:
                backward_of[owner[min(known)]] = index
                made[owner[min(known)]] = min(known)
        forwards, latest = [], -1
        for index in sorted(backward_of):
            after_message = index > 0 and runs[index - 1].kind == _MESSAGE
            own = runs[index]
            first = own.start if after_message or latest > index else self._first_start(own, made[index])
            forwards.append((first, own.end))
            latest = max(latest, backward_of[index])
        return forwards, [(runs[at].start, runs[at].end) for _, at in sorted(backward_of.items())]

    def _first_start(self, run: _Run, made: int) -> int:
        """Where the first forward of a step begins, which nothing separates from the code before the step.

        Operators that make no graph have the number of the next that does, so the last of them is its own. It
        begins when the batch was split, if it was.
        """
        operator = int(run.starts[run.numbers == made][-1])
        return max((end for end in self._splits if run.start <= end <= operator), default=operator)

    def _runs(self) -> list[_Run]:
        """The runs in order, of operators that are not inside of others."""
        kind, start, end, number = (np.array(column, dtype=np.int64) for column in self._columns)
        order = np.lexsort((-end, kind != _MESSAGE, start))  # a wait ends before what it waited for begins
        kind, start, end, number = (column[order] for column in (kind, start, end, number))
        before = (
            np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1])) if len(end) else end
        )
        outer = (start >= before) | (kind == _MESSAGE)
        kind, start, end, number = (column[outer] for column in (kind, start, end, number))
        cuts = np.flatnonzero(np.diff(kind)) + 1
        runs: list[_Run] = []
        for first, last in zip(np.concatenate(([0], cuts)), np.concatenate((cuts, [len(kind)]))):
            if first == last:
                continue
            own = slice(int(first), int(last))
            begin = runs[-1].end if runs else int(start[first])
            runs.append(_Run(int(kind[first]), begin, int(end[own].max()), number[own], start[own]))
        return runs
