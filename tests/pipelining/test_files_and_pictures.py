"""Promise: orders go to files and come from files, torch's and ours, and can be looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.pipelining import _schedule_visualizer as pictures
from tests.oracles import torch_schedules as oracle
from tests.pipelining.test_orders import NAMES, made, order, ours, texts

# --- files -----------------------------------------------------------------------------------------


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


def test_a_plain_multi_stage_schedule_reads_and_writes_orders_too(tmp_path: Path) -> None:
    here = bare(2, 4, 4, runtime=False)
    made("ZBVZeroBubble", 2, 4)._dump_csv(tmp_path / "zbv.csv", format="compute_only")
    here._load_csv(tmp_path / "zbv.csv")
    here._dump_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "zbv.csv").read_bytes()
    assert here.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    with pytest.raises(AssertionError, match="compute_only"):
        here._load_csv(tmp_path / "zbv.csv", format="compute_comms")


def test_formats_that_do_not_fit_are_refused(tmp_path: Path) -> None:
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


# --- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPipe", "1F1B", *NAMES])
def test_a_schedule_is_looked_at_plain_spaced_and_with_messages(name: str) -> None:
    plain = pictures.get_schedule_ops(name, 2, 4)
    spaced = pictures.get_schedule_ops(name, 2, 4, add_spacing=True)
    with_messages = pictures.get_schedule_ops(name, 2, 4, with_comms=True)
    for rank in range(2):
        assert [each for each in spaced[rank] if each is not None] == plain[rank]
        assert [each for each in with_messages[rank] if each is not None and each.is_compute_op] == plain[rank]
    assert None in spaced[1]


def test_what_cannot_be_looked_at_is_refused() -> None:
    with pytest.raises(ValueError, match="add_spacing"):
        pictures.get_schedule_ops("GPipe", 2, 4, add_spacing=True, with_comms=True)
    with pytest.raises(AssertionError, match="one stage per rank"):
        pictures.get_schedule_ops("GPipe", 2, 4, num_stages_per_rank=2)
    with pytest.raises(ValueError, match="a name or a class"):
        pictures.get_schedule_ops(int, 2, 4)  # type: ignore[arg-type]


def test_pictures_go_to_files_and_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = pictures.get_schedule_ops("ZBVZeroBubble", 2, 4)
    for ending, begin in (("svg", b"<svg"), ("png", b"\x89PNG"), ("html", b"<!")):
        pictures.visualize_schedule(ops, str(tmp_path / f"a.{ending}"))
        assert (tmp_path / f"a.{ending}").read_bytes().lstrip().lower().startswith(begin.lower())
    pictures.visualize_schedule(ops)
    assert "rank 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"\.svg"):
        pictures.visualize_schedule(ops, str(tmp_path / "a.bmp"))
