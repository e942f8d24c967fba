"""Promise: with a GPU, the times are those of the compute stream, not of the launches on the host."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from penstock import TraceError, read_trace

COMPUTE, NCCL = 7, 20


def event(name: str, category: str, stream: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times}


def on_device(rank: int, steps: list[tuple[str, float, float]]) -> io.StringIO:
    """Launches take a millisecond each; kernels run when they are said to."""
    events = [
        event("ncclDevKernel_SendRecv", "kernel", NCCL, 0, 9),
        event("nccl:send", "user_annotation", 1, 0, 1),
    ]
    for number, (name, start, end) in enumerate(steps):
        launch = number * 1e-3
        events.append(event(f"PP:{name}", "user_annotation", 1, launch, launch + 1e-3))
        events.append(event(f"PP:{name}", "gpu_user_annotation", NCCL, 0, 9))
        if "SEND" not in name and "RECV" not in name:
            events.append(event(f"PP:{name}", "gpu_user_annotation", COMPUTE, start, end))
            events.append(event("gemm", "kernel", COMPUTE, start, end))
    content = {"distributedInfo": {"rank": rank}, "host_name": "n", "traceEvents": events}
    return io.StringIO(json.dumps(content))


def test_times_are_those_of_kernels_on_the_compute_stream() -> None:
    first = on_device(0, [("0F0", 1, 2), ("0SEND_F0", 0, 0), ("0RECV_B0", 0, 0), ("0B0", 5.5, 7)])
    second = on_device(1, [("1RECV_F0", 0, 0), ("1F0", 2.5, 3.5), ("1B0", 3.5, 5), ("1SEND_B0", 0, 0)])
    run = read_trace([first, second])
    assert str(run.schedule) == "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
    assert run.timeline.makespan == pytest.approx(6)
    compute = run.timeline.is_compute
    assert run.timeline.start[compute].tolist() == pytest.approx([0, 4.5, 1.5, 2.5])
    assert run.costs.per_stage("forward", 2) == pytest.approx([1, 1])


def test_kernels_without_ranges_are_refused_with_the_way_out() -> None:
    content = {"traceEvents": [event("gemm", "kernel", COMPUTE, 0, 1)]}
    with pytest.raises(TraceError, match="label_actions"):
        read_trace([io.StringIO(json.dumps(content))])
