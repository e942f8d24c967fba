"""Promise: files of all ranks give the timeline they were made from, and what cannot be one run is refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Costs, TraceError, build, lower, read_trace, simulate
from penstock.simulation.timeline import Timeline
from penstock.view.perfetto import trace
from tests.support.grids import examples
from tests.support.kineto_files import kineto_events, write_kineto_files

COSTS = Costs(forward=(0.1, 0.12, 0.1, 0.14), backward=(0.2, 0.24, 0.2, 0.28), latency=0.01)


def _bytes_of(rank: int) -> bytes:
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), COSTS_OF_TWO)
    content = {
        "distributedInfo": {"rank": rank},
        "host_name": "a",
        "traceEvents": kineto_events(timeline, rank),
    }
    return json.dumps(content).encode()


COSTS_OF_TWO = Costs(forward=0.1, backward=0.2, latency=0.01)
_SMALL, _OTHER = _bytes_of(0), _bytes_of(1)


def simulated(family: str = "interleaved-1f1b", *, lowered: bool = True) -> Timeline:
    schedule = build(family, ranks=2, microbatches=4, stages_per_rank=2)
    return simulate(lower(schedule) if lowered else schedule, COSTS)


def assert_same_times(found: Timeline, expected: Timeline, tolerance: float = 1e-8) -> None:
    assert found.schedule == expected.schedule
    compute = expected.is_compute
    np.testing.assert_allclose(found.start[compute], expected.start[compute], atol=tolerance)
    np.testing.assert_allclose(found.end[compute], expected.end[compute], atol=tolerance)


@pytest.mark.parametrize("family", ["interleaved-1f1b", "looped-bfs", "zbv", "dualpipev"])
@pytest.mark.parametrize("level", ["compute", "lowered"])
def test_a_timeline_survives_its_trace(tmp_path: Path, family: str, level: str) -> None:
    expected = simulated(family, lowered=level == "lowered")
    run = read_trace(write_kineto_files(tmp_path, expected))
    assert_same_times(run.timeline, expected)
    assert family in run.recognition.families
    if family != "dualpipev":  # a pair tells nothing of its parts
        assert run.costs.per_stage("forward", 4) == pytest.approx(COSTS.per_stage("forward", 4))
    assert run.clocks.shared_clock


def test_clocks_of_hosts_are_aligned(tmp_path: Path) -> None:
    expected = simulated()
    run = read_trace(write_kineto_files(tmp_path, expected, ahead=[0.0, 3.5], hosts=["a", "b"]))
    assert run.clocks.offsets[1] == pytest.approx(3.5, abs=run.clocks.uncertainty[1] + 1e-6)
    assert run.clocks.uncertainty[1] < 0.02
    assert run.clocks.residual == 0
    assert_same_times(run.timeline, expected, run.clocks.uncertainty[1] + 1e-6)


def test_files_are_paths_or_open_and_compressed_or_not_in_any_order(tmp_path: Path) -> None:
    expected = simulated()
    paths = write_kineto_files(tmp_path, expected)
    first, second = (path.read_bytes() for path in paths)
    ways: tuple[list[Any], ...] = (
        [str(path) for path in reversed(paths)],
        [io.BytesIO(second), io.BytesIO(gzip.compress(first))],
        [io.StringIO(first.decode()), io.BytesIO(second)],
    )
    for sources in ways:
        assert_same_times(read_trace(sources).timeline, expected)
    read: list[int] = []
    read_trace(paths, on_read=read.append)
    assert sum(read) == len(first) + len(second)


def test_the_median_step_is_chosen_unless_one_is_given(tmp_path: Path) -> None:
    paths = write_kineto_files(tmp_path, simulated(), steps=3)
    for path in paths:  # the second step is longer
        content = json.loads(path.read_text())
        ranges = [each for each in content["traceEvents"] if each["name"].startswith("PP:")]
        ranges[2 * len(ranges) // 3 - 1]["dur"] += 1e5
        path.write_text(json.dumps(content))
    run = read_trace(paths)
    assert len(run.timelines) == 3
    assert run.step == run.median_step != 1
    assert run.timeline.period == pytest.approx(1.25 * simulated().makespan)
    assert read_trace(paths, step=1).timeline.makespan == pytest.approx(simulated().makespan + 0.1, rel=0.05)
    with pytest.raises(TraceError, match=r"step must be from 0 to 2: there are 3 complete steps \(given 3\)"):
        read_trace(paths, step=3)


def test_steps_that_are_cut_are_left_out(tmp_path: Path) -> None:
    paths = write_kineto_files(tmp_path, simulated(), steps=3)
    content = json.loads(paths[1].read_text())
    content["traceEvents"] = content["traceEvents"][40:]  # the first step of rank 1 has lost its beginning
    paths[1].write_text(json.dumps(content))
    assert len(read_trace(paths).timelines) == 2
    content["traceEvents"] = content["traceEvents"][:60]
    paths[1].write_text(json.dumps(content))
    with pytest.raises(TraceError, match=r"rank1\.json: no complete step"):
        read_trace(paths)


def test_a_trace_that_penstock_wrote(tmp_path: Path) -> None:
    expected = simulated(lowered=False)
    path = tmp_path / "trace.json"
    path.write_text(trace([expected]))
    assert_same_times(read_trace(path).timeline, expected)
    path.write_text(trace([expected, simulated("zbv", lowered=False)]))
    with pytest.raises(TraceError, match=r"one of the 2 timelines in .*: 0 \(interleaved-1f1b\), 1 \(zbv\)"):
        read_trace(path)
    assert "zbv" in read_trace(path, step=1).recognition.families


def test_collectives_beside_compute_are_no_overhead(tmp_path: Path) -> None:
    schedule = lower(build("looped-bfs", ranks=2, microbatches=4))
    path = tmp_path / "trace.json"
    path.write_text(trace([simulate(schedule, Costs(unshard=0.5, reduce_grad=0.5))]))
    assert "looped-bfs" in read_trace(path).recognition.families


def test_the_search_keeps_placement_and_memory(tmp_path: Path) -> None:
    run = read_trace(write_kineto_files(tmp_path, simulated()))
    found = run.search(seconds=0.5)
    assert found.value <= run.predicted.makespan + 1e-9
    assert found.schedule.placement == run.schedule.placement


# --- what is refused ---------------------------------------------------------------------------------


def edited(tmp_path: Path, change: Any) -> list[Path]:
    paths = write_kineto_files(tmp_path, simulated())
    for path in paths:
        content = json.loads(path.read_text())
        change(content, path)
        path.write_text(json.dumps(content))
    return paths


def damage_times(content: Any, _: Path) -> None:
    ranges = [each for each in content["traceEvents"] if each["name"].startswith("PP:")]
    ranges[0]["ts"] = "soon"
    del ranges[1]["dur"]
    ranges[2]["dur"] = -1
    content["traceEvents"].append(17)


def test_all_problems_of_all_files_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(edited(tmp_path, damage_times))
    assert len(error.value.problems) == 8
    text = str(error.value)
    for part in ("rank0.json: event 1 (PP:", "rank1.json: event", "ts is not a number", "it is not an object"):
        assert part in text


def rename(content: Any, _: Path) -> None:
    next(each for each in content["traceEvents"] if each["name"] == "PP:0F0" or each["name"] == "PP:1F0")[
        "name"
    ] = "PP:__import__('os')"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (rename, "is not an action"),
        (lambda content, _: content.update(baseTimeNanoseconds=1 << 70), "baseTimeNanoseconds must be"),
        (lambda content, _: content["traceEvents"][1].update(ts=1e17), "ts and dur must be from 0 to 3e+15"),
        (lambda content, _: content.update(traceEvents=[]), "no trace events"),
        (lambda content, _: content.update(traceEvents=[{"ph": "X", "name": "x"}]), "no range PP:"),
        (
            lambda content, _: content["traceEvents"].append(
                {"ph": "X", "cat": "user_annotation", "name": "nccl:send", "ts": 1, "dur": 1}
            ),
            "no kernels, so its ranges are only launches",
        ),
    ],
)
def test_traces_without_what_is_needed_are_refused(tmp_path: Path, change: Any, problem: str) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(edited(tmp_path, change))
    assert problem in str(error.value)


def test_files_that_are_not_of_one_pipeline_are_refused(tmp_path: Path) -> None:
    paths = write_kineto_files(tmp_path, simulated())
    with pytest.raises(TraceError, match=r"stage 0 is also in .*: give all files of each pipeline, each once"):
        read_trace([paths[0], paths[0], paths[1]])
    with pytest.raises(TraceError, match="no file has stage 0, 2: give one file for each rank"):
        read_trace(paths[1:])
    with pytest.raises(TraceError, match="no trace is given"):
        read_trace([])


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08 damaged", b"\xff\xfe{", b"cos\nsystem\n(S'true'\ntR."])
def test_what_is_no_text_is_refused(content: bytes) -> None:
    with pytest.raises(TraceError, match="<file>: "):
        read_trace([io.BytesIO(content)])


def test_gzip_that_ends_early_is_refused(tmp_path: Path) -> None:
    (path, _) = write_kineto_files(tmp_path, simulated(), compressed=True)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match="damaged gzip data after"):
        read_trace(path)


def test_a_huge_stage_number_is_refused_at_once(tmp_path: Path) -> None:
    def enlarge(content: Any, path: Path) -> None:
        if path.name == "rank1.json":
            content["traceEvents"][1]["name"] = "PP:65000F0"

    with pytest.raises(TraceError, match="no file has stage"):
        read_trace(edited(tmp_path, enlarge))


DAMAGE = [b"", b"0", b'"', b"}", b"[", b"-1e999", b"\xff", b"9F", b"c10d::send", b"cpu_op", b"kernel"]


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_files_raise_no_other_error(data: st.DataObject) -> None:
    text = bytearray(_SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.sampled_from([0, 1, 2, 30]))
        text[at : at + length] = data.draw(st.sampled_from(DAMAGE))
    if data.draw(st.booleans()):  # without ranges: operators alone
        text = text.replace(b"PP:", b"aten")
    with contextlib.suppress(TraceError):
        read_trace([io.BytesIO(bytes(text)), io.BytesIO(_OTHER)])


def test_the_result_is_the_public_type() -> None:
    assert type(read_trace([io.BytesIO(_SMALL), io.BytesIO(_OTHER)])) is penstock.MeasuredRun
