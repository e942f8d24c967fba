"""Promise: torchtitan gets a name with the placement and a CSV with the order, or the reason why not."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock
from penstock.cost.estimate.model_config import ARCHITECTURES
from penstock.errors import ExportError
from penstock.formats import reads
from penstock.lowering import Recompute
from penstock.planning.layout import even_layout, parse_layout
from penstock.trainers import Export, export_torchtitan
from penstock.trainers.torchtitan import MODELS, MODELS_WITHOUT_PIPELINES, VERSION
from tests.support.model_configs import config

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


def installed_models() -> dict[str, bool]:
    """The models in torchtitan's registry, and whether the `TrainSpec` of each has a pipelining function.

    Its source is read, not imported: importing torchtitan needs triton, and takes ten seconds.
    """
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "models"
    registry = ast.parse((folder / "__init__.py").read_text())
    names = next(node.value for node in registry.body if isinstance(node, ast.Assign))
    found = {}
    for name in ast.literal_eval(names.args[0]):  # type: ignore[attr-defined]
        tree = ast.parse((folder / name / "__init__.py").read_text())
        given = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "pipelining_fn"
        ]
        found[name] = not isinstance(given[0], ast.Constant)
    return found


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_the_models_are_those_of_the_installed_torchtitan() -> None:
    assert version("torchtitan") == VERSION
    found = installed_models()
    assert {"llama3", "qwen3", "flux"} <= found.keys()
    assert all(found[name] for name in MODELS.values())
    assert not any(found[name] for name in MODELS_WITHOUT_PIPELINES.values())
    others = ARCHITECTURES.keys() - MODELS.keys() - MODELS_WITHOUT_PIPELINES.keys()
    assert not others & found.keys()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "torchtitan 0.2.2 has no gpt2 model, so it cannot run gpt2 in a pipeline"),
        ("mixtral-8x7b", "torchtitan 0.2.2 has no mixtral model, so it cannot run mixtral-8x7b in a pipeline"),
        ("qwen3-32b", "torchtitan 0.2.2 has no pipelining_fn for its qwen3, so it cannot run qwen3-32b"),
    ],
)
def test_models_that_torchtitan_does_not_run_in_pipelines_are_refused(name: str, reason: str) -> None:
    model = config(name)
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ExportError) as caught:
        export_torchtitan(schedule, even_layout(model.layers, 2), model=model)
    assert reason in str(caught.value)
    assert "it runs the model types llama, deepseek_v2, deepseek_v3" in str(caught.value)
    assert str(caught.value).endswith(f"give layers={model.layers} in place of model")


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
def test_models_that_torchtitan_runs_in_pipelines_are_accepted(name: str) -> None:
    model = config(name)
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    export_torchtitan(schedule, even_layout(model.layers, 2), model=model)


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
