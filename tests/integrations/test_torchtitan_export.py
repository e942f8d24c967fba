"""Promise: torchtitan gets a name with the placement and a CSV with the order, or the reason why not."""

from __future__ import annotations

import sys

import pytest

import penstock
from penstock.errors import ExportError
from penstock.formats import reads
from penstock.integrations import Export, export_torchtitan
from penstock.lowering import Recompute
from penstock.planning.layout import even_layout
from penstock.planning.layout_text import parse_layout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def exported(schedule: penstock.Schedule, layers: int = 16, size: int = 2) -> Export:
    return export_torchtitan(schedule, even_layout(layers, schedule.num_stages), size, "out")


def refusal(schedule: penstock.Schedule, text: str = "") -> str:
    layout = parse_layout(text) if text else even_layout(16, schedule.num_stages)
    with pytest.raises(ExportError) as caught:
        export_torchtitan(schedule, layout)
    return str(caught.value)


@pytest.mark.parametrize("family", TORCH)
def test_torchs_own_schedules_are_given_by_name(family: str) -> None:
    made = exported(penstock.lower(penstock.build(family, ranks=4, microbatches=12)))
    keys = tomllib.loads(made.files["torchtitan.toml"])
    assert keys["parallelism"]["pipeline_parallel_schedule"] == TORCH[family]
    assert "pipeline_parallel_schedule_csv" not in keys["parallelism"]
    assert list(made.files) == ["torchtitan.toml"]
    assert keys["training"] == {"local_batch_size": 24}


@pytest.mark.parametrize(
    ("family", "named"),
    [("zb-h1", "1F1B"), ("interleaved-overlap", "Interleaved1F1B"), ("v-half", "ZBVZeroBubble")],
)
def test_other_orders_have_a_csv_and_a_name_with_their_placement(family: str, named: str) -> None:
    schedule = penstock.build(family, ranks=4, microbatches=12)
    made = exported(penstock.lower(schedule))
    assert reads(made.files["schedule.csv"], "csv") == schedule
    settings = tomllib.loads(made.files["torchtitan.toml"])["parallelism"]
    assert settings["pipeline_parallel_schedule"] == named
    assert settings["pipeline_parallel_schedule_csv"] == "out/schedule.csv"
    assert f"--parallelism.pipeline_parallel_schedule={named}" in made.flags


def test_stages_are_lists_of_module_names() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    made = export_torchtitan(schedule, parse_layout("Ett|tL"))
    settings = tomllib.loads(made.files["torchtitan.toml"])["parallelism"]
    assert settings["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "output"],
    ]


def test_an_invalid_schedule_is_refused_with_the_report_of_the_validator() -> None:
    broken = penstock.Schedule(["0B0 0F0", "1F0 1B0"], name="mine")
    with pytest.raises(penstock.ScheduleError, match=r"mine has \d violations?\nerror\["):
        exported(broken)


def test_what_torchtitan_cannot_run_is_refused_with_all_reasons() -> None:
    unequal = penstock.build("interleaved-1f1b", ranks=3, microbatches=6, stages_per_rank=[1, 2, 1])
    message = refusal(unequal, "Et||mL")
    assert "the layout Et||mL has 3 stages, the schedule 4" in message
    assert "stage 1 of the layout Et||mL is empty" in message
    assert "no MTP layers" in message
    assert "stages are on the ranks [0, 1, 1, 2], but torchtitan takes the placement from" in message
    assert message.endswith("or a V with two; nearest is 1f1b")
    recomputed = Recompute()(penstock.build("1f1b", ranks=2, microbatches=4))
    assert "has no actions RECOMPUTE" in refusal(recomputed)
    graph = penstock.StageGraph.parse("0>1,1>2,0>2")
    assert "stages in a chain only" in refusal(penstock.build("1f1b", ranks=3, microbatches=3, graph=graph))
