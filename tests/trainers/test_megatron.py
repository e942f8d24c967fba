"""Promise: Megatron gets the flags of the schedules that it runs, and the reason for all others."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.errors import ExportError
from penstock.planning.layout import even_layout, parse_layout
from penstock.trainers import export_megatron


def test_the_flags_of_1f1b_and_of_interleaved_1f1b_with_groups() -> None:
    made = export_megatron(penstock.build("1f1b", ranks=4, microbatches=8), even_layout(14, 4), 2)
    assert made.flags == [
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-layout 'Et*3|(t*4|)*2,t*3L'",
        "--num-layers 14",
        "--micro-batch-size 2",
    ]
    assert made.notes[0] == "--global-batch-size is 16 times the data-parallel size"
    grouped = penstock.build("interleaved-1f1b", ranks=4, microbatches=16, group=8)
    assert "--microbatch-group-size-per-vp-stage 8" in export_megatron(grouped, even_layout(16, 8)).flags
    paired = penstock.build("interleaved-overlap", ranks=4, microbatches=16)
    assert "--overlap-moe-expert-parallel-comm" in export_megatron(paired, even_layout(16, 8)).flags


def test_equal_stages_need_no_layout() -> None:
    flag = "--pipeline-model-parallel-layout Megatron makes the same stages"
    plain = export_megatron(penstock.build("1f1b", ranks=4, microbatches=8), even_layout(16, 4))
    assert plain.notes[1] == f"without {flag}"
    interleaved = penstock.build("interleaved-1f1b", ranks=4, microbatches=8)
    made = export_megatron(interleaved, even_layout(16, 8))
    assert made.notes[1] == f"with --num-layers-per-virtual-pipeline-stage 2 instead of {flag}"
    assert len(export_megatron(interleaved, even_layout(18, 8)).notes) == 1


def test_a_layout_with_multi_token_prediction() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=16, microbatches=32)
    made = export_megatron(schedule, parse_layout("Et*3|(tt|)*29,m|L"))
    assert "--pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L'" in made.flags
    assert "--mtp-num-layers 1" in made.flags
    assert made.files["flags.txt"].startswith("--pipeline-model-parallel-size 16 \\\n")


@pytest.mark.parametrize("family", ["zbv", "zb-h1", "gpipe"])
def test_other_schedules_are_refused_with_the_nearest(family: str) -> None:
    schedule = penstock.build(family, ranks=4, microbatches=8)
    with pytest.raises(ExportError, match=f"this schedule is {family}.*nearest is"):
        export_megatron(schedule, even_layout(16, schedule.num_stages))


def test_prediction_layers_are_in_the_last_stage_of_their_rank() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=2, microbatches=4)
    with pytest.raises(ExportError, match=r"must be in the last stage of their rank, and stage 1 is not"):
        export_megatron(schedule, parse_layout("Et|m||L"))


@pytest.mark.parametrize(
    ("microbatches", "group", "runs"),
    [(8, None, True), (6, None, False), (3, None, False), (11, 6, True), (8, 6, False), (13, 6, False)],
)
def test_the_last_group_of_microbatches_has_one_for_each_rank(
    microbatches: int, group: int | None, *, runs: bool
) -> None:
    options: dict[str, Any] = {} if group is None else {"group": group}
    schedule = penstock.build("interleaved-1f1b", ranks=4, microbatches=microbatches, **options)
    if runs:
        export_megatron(schedule, even_layout(16, 8))
        return
    with pytest.raises(ExportError, match=r"the last one must have at least 4.*try \d+ microbatches"):
        export_megatron(schedule, even_layout(16, 8))
