"""Promise: forwards and backwards of torch's 1F1B are found by their operators; what is none is refused."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import TraceError, read_trace
from tests.support.grids import examples

EVALUATION = "autograd::engine::evaluate_function: MmBackward0"
NAMES = ("aten::mm", "c10d::send", "c10d::recv_", EVALUATION, "aten::tensor_split")


class Rank:
    """Writes the operators of a rank one after the other; times are in milliseconds."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now, self.events = rank, 0.0, list[dict[str, Any]]()

    def run(self, name: str, ms: float, number: int = 0, category: str = "cpu_op") -> Rank:
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "tid": 1,
            "args": {"Sequence number": number},
        }
        self.events.append(event | {"ts": self.now * 1e3, "dur": ms * 1e3})
        self.now += ms
        return self

    def until(self, ms: float) -> Rank:
        """Wait for a message until then."""
        self.run("c10d::recv_", 0.1)
        return self.run("gloo:recv", ms - self.now, category="user_annotation")

    def file(self) -> io.StringIO:
        content = {"distributedInfo": {"rank": self.rank}, "host_name": "a", "traceEvents": self.events}
        return io.StringIO(json.dumps(content))


def test_a_step_of_two_microbatches() -> None:
    first, last = Rank(0), Rank(1)
    first.run("aten::mul_", 3, 0).run("aten::tensor_split", 1, 0)  # the optimizer of the step before
    first.run("aten::mm", 10, 0).run("c10d::send", 1, 1).run("aten::mm", 10, 1).run("c10d::send", 1, 2)
    first.until(55).run(EVALUATION, 20, 0).until(85).run(EVALUATION, 20, 1).run("aten::div_", 1, 2)
    last.until(16).run("aten::mm", 10, 0).run("aten::mse", 1, 1).run(EVALUATION, 20, 1).run(EVALUATION, 5, 0)
    last.run("c10d::send", 1, 2).until(54).run("aten::mm", 10, 2).run(EVALUATION, 20, 2).run("c10d::send", 1, 3)
    run = read_trace([first.file(), last.file()])
    assert str(run.schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert run.timeline.makespan == pytest.approx(0.101)
    assert run.costs.per_stage("forward", 2) == pytest.approx([0.010, 0.0105])
    assert run.costs.full_backward(2) == pytest.approx([0.020, 0.0225])


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 10), st.integers(-1, 9)), max_size=30))
def test_any_operators_are_read_or_refused(operators: list[tuple[str, float, int]]) -> None:
    ranks = Rank(0), Rank(1)
    for index, each in enumerate(operators):
        ranks[index % 2].run(*each)
    with contextlib.suppress(TraceError):
        read_trace(rank.file() for rank in ranks)
