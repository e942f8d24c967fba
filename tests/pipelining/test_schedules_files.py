"""Tests of reading and writing orders as CSV files: torch's and ours are interchangeable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from tests.oracles import torch_schedules as oracle
from tests.support.pipelining_orders import NAMES, made, order, ours, texts


def bare(ranks: int, stages: int, microbatches: int, runtime: bool = True) -> Any:  # noqa: FBT001, FBT002
    about = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
    kind = ours._PipelineScheduleRuntime if runtime else ours.PipelineScheduleMulti
    return kind([SimpleNamespace(stage_index=0, **about)], microbatches)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_files_of_torch_are_read_here_and_ours_by_torch(tmp_path: Path, name: str, form: str) -> None:
    mine, yours = made(name, 2, 4), oracle.built(name, 2, 2, 4)
    mine._dump_csv(tmp_path / "mine.csv", format=form)
    yours._dump_csv(tmp_path / "yours.csv", format=form)
    here, there = bare(2, 4, 4), oracle.built("LoopedBFS", 2, 2, 4)
    here._load_csv(tmp_path / "yours.csv", format=form)
    there._load_csv(tmp_path / "mine.csv", format=form)
    assert [sorted(row) for row in texts(here.pipeline_order_with_comms)] == [
        sorted(row) for row in oracle.as_rows(there.pipeline_order_with_comms)
    ]
    assert here.stage_index_to_group_rank == there.stage_index_to_group_rank
    if form == "compute_only":
        assert texts(here.pipeline_order) == texts(mine.pipeline_order)


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_files_of_every_version_are_read_and_written_for_the_installed_torch(
    tmp_path: Path, version: str
) -> None:
    """Lists have waits from torch 2.15 on: 2.15 refuses files without them, and 2.13 those with them."""
    schedule = penstock.build("zbv", ranks=2, microbatches=4)
    penstock.lower(schedule, torch=version).write(tmp_path / "theirs.csv")
    here, there = bare(2, 4, 4), oracle.built("ZBVZeroBubble", 2, 2, 4)
    here._load_csv(tmp_path / "theirs.csv", format="compute_comms")
    rows = texts(here.pipeline_order_with_comms)
    assert [any("WAIT" in text for text in row) for row in rows] == [oracle.HAS_WAITS] * 2
    assert sorted(rows[0]) == sorted(oracle.as_rows(there.pipeline_order_with_comms)[0])
    here._dump_csv(tmp_path / "here.csv")
    there._load_csv(tmp_path / "here.csv", format="compute_comms")
    assert oracle.as_rows(there.pipeline_order_with_comms) == rows


@pytest.mark.parametrize("text", ["0WAIT_SEND_F0", "1WAIT_REDUCE_GRAD"])
def test_a_wait_is_an_action_where_torch_has_it(text: str) -> None:
    if oracle.HAS_WAITS:
        assert str(ours._Action.from_str(text)) == text
    else:
        with pytest.raises(RuntimeError, match="Invalid action string"):
            ours._Action.from_str(text)


def test_a_plain_multi_stage_schedule_reads_and_writes_orders_too(tmp_path: Path) -> None:
    here = bare(2, 4, 4, runtime=False)
    made("ZBVZeroBubble", 2, 4)._dump_csv(tmp_path / "zbv.csv", format="compute_only")
    here._load_csv(tmp_path / "zbv.csv")
    here._dump_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "zbv.csv").read_bytes()
    assert here.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    with pytest.raises(AssertionError, match="compute_only"):
        here._load_csv(tmp_path / "zbv.csv", format="compute_comms")


def test_formats_that_do_not_match_are_rejected(tmp_path: Path) -> None:
    mine = made("LoopedBFS", 2, 2)
    mine._dump_csv(tmp_path / "lowered.csv")
    with pytest.raises(ValueError, match="compute_comms"):
        bare(2, 4, 2)._load_csv(tmp_path / "lowered.csv")
    with pytest.raises(NotImplementedError, match="'csv'"):
        bare(2, 4, 2)._load_csv(tmp_path / "lowered.csv", format="csv")
    with pytest.raises(AssertionError, match="idle"):
        bare(1, 1, 1)._prepare_schedule_with_comms({0: [None, *order("0F0 0B0")[0]]}, format="compute_comms")
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0junk,1B0\n")
    with pytest.raises(penstock.FormatError, match="row 2, column 1"):
        bare(2, 2, 1)._load_csv(tmp_path / "bad.csv")
