"""Promise: traces of real runs, on torch's runtime and on ours, become timelines of the steps that were run."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock import simulate
from penstock.ir.kinds import Kind
from penstock.traces.measured_run import MeasuredRun
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.recorded_runs import MICROBATCHES, NAP, record_labelled, record_ours, record_torchs
from tests.support.slowness import slowness

P = 2
FAMILY_OF = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zero-bubble",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}

OF_EACH_FORMAT = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleDualPipeV")


def recorded(pools: Pools, directory: Path, function: object, *args: object) -> tuple[MeasuredRun, list[float]]:
    """The run as it is read, and the measured length of each step."""
    times = pools(P).run(function, *args, str(directory))  # type: ignore[arg-type]
    lengths = [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*times)]
    return penstock.read_trace(directory / f"rank{rank}.json" for rank in range(P)), lengths


@pytest.mark.parametrize("kind", ["sleep", "gpt"])
@pytest.mark.parametrize("name", FAMILY_OF)
@small(
    lambda kind, name: (kind == "sleep" and name in OF_EACH_FORMAT) or (kind, name) == ("gpt", "Schedule1F1B")
)
def test_every_schedule_of_torch(pools: Pools, tmp_path: Path, name: str, kind: str) -> None:
    run, lengths = recorded(pools, tmp_path, record_torchs, name, kind)
    assert FAMILY_OF[name] in run.recognition.families, str(run.recognition)
    assert len(run.timelines) == len(lengths)
    # a busy machine delays some steps outside of their actions
    errors = [abs(each.makespan / length - 1) for each, length in zip(run.timelines, lengths)]
    assert min(errors) < 0.02 * slowness() ** 2  # what is not in an action takes longer on shared cores
    assert run.clocks.shared_clock
    built = penstock.build(FAMILY_OF[name], ranks=P, microbatches=MICROBATCHES)
    compute = (Kind.F, Kind.I, Kind.W, Kind.B)
    assert built.table.of_kind(Kind.F).sum() == run.schedule.table.of_kind(Kind.F).sum()
    assert run.schedule.only(compute).num_ranks == P
    if kind == "sleep":
        forwards = run.schedule.table.slot[run.schedule.table.of_kind(Kind.F)]
        single = [slot for slot in forwards if len(run.timeline.event(int(slot)).step.parts) == 1]
        assert (run.timeline.end - run.timeline.start)[single].min() >= 0.9 * NAP


def test_costs_of_one_schedule_predict_the_step_of_another(pools: Pools, tmp_path: Path) -> None:
    runs = []
    for name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS"):
        (tmp_path / name).mkdir()
        runs.append(recorded(pools, tmp_path / name, record_torchs, name, "sleep")[0])
    for known, other in (runs, runs[::-1]):
        plain = simulate(other.schedule, known.costs)
        # how busy the machine was is not the order's effect, so both have the same seconds of compute
        errors = []
        for measured in other.timelines:
            scale = sum(measured.busy) / sum(plain.busy)
            predicted = simulate(other.schedule, known.costs.scaled(scale))
            errors.append(abs(predicted.makespan / measured.makespan - 1))
        assert min(errors) < 0.1 * slowness()


def test_labels_name_the_actions_of_torchs_1f1b(pools: Pools, tmp_path: Path) -> None:
    run, _ = recorded(pools, tmp_path, record_labelled, "Schedule1F1B", "sleep")
    assert "1f1b" in run.recognition.families
    assert "PP:0F3" in (tmp_path / "rank0.json").read_text()


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv"])
@small(lambda family: family == "zbv")
def test_penstocks_runtime(pools: Pools, tmp_path: Path, family: str) -> None:
    run, lengths = recorded(pools, tmp_path, record_ours, family, "sleep")
    assert family in run.recognition.families
    assert run.schedule.table.has_communication
    assert '"wait 1RECV_F0"' in (tmp_path / "rank1.json").read_text()
    errors = [abs(each.makespan / length - 1) for each, length in zip(run.timelines, lengths)]
    assert min(errors) < 0.02 * slowness() ** 2  # what is not in an action takes longer on shared cores
