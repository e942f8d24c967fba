"""Promise: a trace of 200 MB is read in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Costs, build, lower, simulate
from tests.support.kineto_files import kineto_events

MEGABYTES = 200
MAX_GROWTH = 64 << 20

READ = """
import resource, sys, penstock, penstock.recognition
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
run = penstock.read_trace(sys.argv[1:])
print(peak() - before, run.recognition.families[0], len(run.timelines))
"""


@pytest.mark.full
def test_200_megabytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    timeline = simulate(lower(build("1f1b", ranks=2, microbatches=4)), Costs(latency=0.01))
    filler = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 1.5, "dur": 2.5}
    filler["args"] = {"External id": 1, "Sequence number": 12, "Input Dims": [[64, 64], [64, 64]]}
    block = ",\n".join([json.dumps(filler, indent=1)] * 4000)
    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"rank{rank}.json")
        events = [json.dumps(event) for event in kineto_events(timeline, rank)]
        with paths[-1].open("w") as file:
            file.write(f'{{"distributedInfo": {{"rank": {rank}}}, "host_name": "a", "traceEvents": [')
            file.write(",".join(events))
            for _ in range(MEGABYTES * 500_000 // len(block)):
                file.write(",\n" + block)
            file.write("]}")
    assert sum(path.stat().st_size for path in paths) > 0.95 * MEGABYTES * 1e6
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 -- our own code
    growth, family, steps = done.stdout.split()
    assert (family, steps) == ("1f1b", "1")
    assert int(growth) < MAX_GROWTH
