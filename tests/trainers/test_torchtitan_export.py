"""Promise: torchtitan gets a name with the placement and a CSV with the order, or the reason why not."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock
from penstock.cost.estimate.model_config import ARCHITECTURES
from penstock.errors import ExportError
from penstock.formats import reads
from penstock.lowering import Recompute
from penstock.planning.layout import even_layout, parse_layout
from penstock.trainers import Export, export_torchtitan, torchtitan
from penstock.trainers.torchtitan import VERSIONS
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


HEADS = {"0.2.2": "output", "0.3.0": "lm_head"}


def exported(
    schedule: penstock.Schedule, layers: int = 16, size: int = 2, version: str | None = "0.2.2"
) -> Export:
    layout = even_layout(layers, schedule.num_stages)
    return export_torchtitan(schedule, layout, size, "out", version=version)


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


@pytest.mark.parametrize("version", VERSIONS)
def test_stages_are_lists_of_the_module_names_of_the_version(version: str) -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    made = export_torchtitan(schedule, parse_layout("Ett|tL"), version=version)
    last = f"layers.2,norm,{HEADS[version]}"
    name = "--parallelism.module_fqns_per_model_part"
    assert f"{name} tok_embeddings,layers.0,layers.1 {last}" in made.flags
    if version == "0.2.2":
        settings = tomllib.loads(made.files["torchtitan.toml"])["parallelism"]
        stages = [["tok_embeddings", "layers.0", "layers.1"], last.split(",")]
        assert settings["module_fqns_per_model_part"] == stages
    else:
        assert made.files == {"flags.txt": " \\\n".join(made.flags) + "\n"}
        assert made.flags[-1] == "--training.disable_cuda_graphs"


def test_the_version_is_the_installed_one_or_else_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    for installed, note in (
        ("0.2.2", "torchtitan 0.2.2;"),
        ("0.3.0", "torchtitan 0.3.0,"),
        (None, "torchtitan 0.3.0,"),
    ):
        monkeypatch.setattr(torchtitan, "installed_version", lambda found=installed: found)
        notes = exported(schedule, version=None).notes
        assert len(notes) == 1
        assert notes[0].startswith(f"these are flags of {note}")
    monkeypatch.setattr(torchtitan, "installed_version", lambda: "0.9.1")
    unknown = "torchtitan 0.9.1 is installed, which Penstock does not know: it knows 0.2.2, 0.3.0"
    assert exported(schedule, version=None).notes[-1] == unknown
    assert len(exported(schedule, version="0.2.2").notes) == 1
    with pytest.raises(ExportError, match=r"version must be one of 0\.2\.2, 0\.3\.0 \(given 0\.1\)"):
        exported(schedule, version="0.1")


def installed_folder() -> Path:
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def installed_models() -> dict[str, bool]:
    """The models in torchtitan's registry, and whether the `TrainSpec` of each has a pipelining function.

    Its source is read, not imported: importing torchtitan needs triton, and takes ten seconds.
    """
    folder = installed_folder() / "models"
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
    number = torchtitan.installed_version()
    assert number in VERSIONS
    titan, found = VERSIONS[number], installed_models()
    assert {"llama3", "qwen3", "flux"} <= found.keys()
    assert all(found[name] for name in titan.models.values())
    assert not any(found[name] for name in titan.models_without_pipelines.values())
    others = ARCHITECTURES.keys() - titan.models.keys() - titan.models_without_pipelines.keys()
    assert not others & found.keys()


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_the_output_layer_has_the_name_of_the_installed_torchtitan() -> None:
    number = torchtitan.installed_version()
    assert number is not None
    text = (installed_folder() / "distributed" / "pipeline_parallel.py").read_text()
    own = {version for version, head in HEADS.items() if f'["norm", "{head}"]' in text}
    assert own == {number}
    assert VERSIONS[number].head == HEADS[number]


def test_the_tables_of_all_versions() -> None:
    for titan in VERSIONS.values():
        assert not titan.models.keys() & titan.models_without_pipelines.keys()
        assert {*titan.models, *titan.models_without_pipelines} <= ARCHITECTURES.keys()
        assert titan.models["llama"] == "llama3"
    assert {version: titan.head for version, titan in VERSIONS.items()} == HEADS


@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [
        ("gpt2", "0.2.2", "torchtitan 0.2.2 has no gpt2 model, so it cannot run gpt2 in a pipeline"),
        ("gpt2", "0.3.0", "torchtitan 0.3.0 has no gpt2 model, so it cannot run gpt2 in a pipeline"),
        ("mixtral-8x7b", "0.2.2", "has no mixtral model, so it cannot run mixtral-8x7b in a pipeline"),
        ("qwen3-32b", "0.2.2", "has no pipelining_fn for its qwen3, so it cannot run qwen3-32b"),
        ("tied qwen3-32b", "0.3.0", "torchtitan 0.3.0 refuses tied weights in pipelines"),
    ],
)
def test_models_that_torchtitan_does_not_run_in_pipelines_are_refused(
    name: str, version: str, reason: str
) -> None:
    model = config(name.removeprefix("tied "))
    if name.startswith("tied "):
        model = replace(model, tied=True)
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ExportError) as caught:
        export_torchtitan(schedule, even_layout(model.layers, 2), model=model, version=version)
    assert reason in str(caught.value)
    assert f"it runs the model types {', '.join(VERSIONS[version].models)}" in str(caught.value)
    assert str(caught.value).endswith(f"give layers={model.layers} in place of model")


@pytest.mark.parametrize(
    ("name", "version"),
    [("llama-3-8b", "0.2.2"), ("deepseek-v3", "0.2.2"), ("llama-3-8b", "0.3.0"), ("qwen3-32b", "0.3.0")],
)
def test_models_that_torchtitan_runs_in_pipelines_are_accepted(name: str, version: str) -> None:
    model = config(name)
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    export_torchtitan(schedule, even_layout(model.layers, 2), model=model, version=version)


def test_an_invalid_schedule_is_refused_with_the_report_of_the_validator() -> None:
    broken = penstock.Schedule(["0B0 0F0", "1F0 1B0"], name="mine")
    with pytest.raises(penstock.ScheduleError, match=r"mine has \d violations?\nerror\["):
        exported(broken)


def test_what_torchtitan_cannot_run_is_refused_with_all_reasons() -> None:
    unequal = penstock.build("interleaved-1f1b", ranks=3, microbatches=6, stages_per_rank=[1, 2, 1])
    message = refusal(unequal, "Et||mL")
    assert "the layout Et||mL has 3 stages, the schedule 4" in message
    assert "stage 1 of the layout Et||mL is empty" in message
    assert "runs no MTP layers in pipelines" in message
    assert "stages are on the ranks [0, 1, 1, 2], but torchtitan takes the placement from" in message
    assert message.endswith("or a V with two; nearest is 1f1b")
    recomputed = Recompute()(penstock.build("1f1b", ranks=2, microbatches=4))
    assert "has no actions RECOMPUTE" in refusal(recomputed)
    graph = penstock.StageGraph.parse("0>1,1>2,0>2")
    assert "stages in a chain only" in refusal(penstock.build("1f1b", ranks=3, microbatches=3, graph=graph))
