"""Tests of `penstock plan` with a model config."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

from tests.support.command_line import Run, stderr_on_terminal
from tests.support.model_configs import gpt_keys


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(gpt_keys(2048, 8, 16)))
    return path


JOB = [
    "--devices",
    8,
    "--batch",
    16,
    "--seq",
    1024,
    "--tp",
    2,
    "--microbatch-size",
    1,
    "--recompute-granularity",
    "none",
]


def test_it_prints_a_ranking_a_plot_and_the_reasons(run: Run, config: Path) -> None:
    result = run("plan", config, *JOB, "--top", 2, "--explain", "-o", "frontier.svg", "--write", "best")
    assert result.code == 0
    assert result.out.startswith("small: 8 h100, 16 samples of 1024 tokens\n")
    for text in ("tokens/s", "best: TP2 ", "why it wins:", "where its time goes: ", "what would help"):
        assert text in result.out
    assert "small: 8 h100" in Path("frontier.svg").read_text()
    keys = json.loads(Path("best/plan.json").read_text())
    assert keys["tp"] * keys["pp"] * keys["dp"] == 8
    assert f", layout {keys['layout']}\n" in result.out
    command = result.out.splitlines()[-1].removeprefix("flags for a trainer: penstock ")
    assert "--parallelism.pipeline_parallel_degree" in run(*shlex.split(command)).out
    again = run("simulate", "best/schedule.json", "--costs", "best/costs.toml", "--json").json
    assert again["makespan"] == pytest.approx(keys["makespan"], rel=0.05)


def test_json_has_every_option(run: Run, config: Path) -> None:
    record = run("plan", config, *JOB, "--ranks", 2, "--json").json
    assert (record["devices"], record["interrupted"]) == (8, False)
    assert {(each["tp"], each["pp"], each["dp"]) for each in record["ranked"]} == {(2, 2, 2)}
    assert all(each["seconds"] >= record["bound"] for each in record["ranked"])


@pytest.mark.parametrize("more", [[], ["--explain"]])
def test_a_batch_that_excludes_data_parallel_sizes_is_named_once(
    run: Run, config: Path, more: list[str]
) -> None:
    job = [
        "--devices",
        8,
        "--batch",
        9,
        "--seq",
        1024,
        "--tp",
        2,
        "--recompute-granularity",
        "none",
        "--seconds",
        0,
    ]
    result = run("plan", config, *job, *more)
    divisible = "the batch of 9 must be divisible by DP x microbatch size; a batch of 8 also allows DP"
    rule = f"DP 2, 4 are left out: {divisible}"
    assert result.out.count(rule) == 1
    assert run("plan", config, *job, "--json").json["excluded_data_parallel_sizes"] == [2, 4]


def test_the_schedules_that_a_trainer_runs_are_the_only_ones(run: Run, config: Path) -> None:
    record = run("plan", config, *JOB, "--schedules", "1f1b,interleaved-1f1b", "--write", "best", "--json").json
    assert {each["schedule"] for each in record["ranked"]} <= {"1f1b", "interleaved-1f1b"}
    best = json.loads(Path("best/plan.json").read_text())
    exported = run("export", "megatron", "best/schedule.json", "--layout", best["layout"])
    assert f"--pipeline-model-parallel-size {best['pp']}\n" in exported.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*JOB, "--schedules", "1f1b,zvb"], "(given zvb); did you mean zbv?"),
        ([], "a model config needs --devices and --batch, e.g. penstock plan"),
        ([*JOB, "-v", 2], "--stages-per-rank: only with a model file"),
        ([*JOB, "--jitter", 3], "--jitter"),
        ([*JOB, "--memory", "1GB"], "small fits no layout of 8 h100 with 954 MiB each"),
        ([*JOB, "--device", "tpu"], "no device is called 'tpu'"),
    ],
)
def test_errors_say_what_is_missing(run: Run, config: Path, arguments: list[object], message: str) -> None:
    result = run("plan", config, *arguments)
    assert result.code == 2
    assert message in result.message


def test_a_config_without_its_type_is_not_taken_for_costs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2}))
    assert "missing model_type; known are llama" in run("plan", path, "--devices", 8, "--batch", 8).message


def test_options_of_a_config_are_refused_for_model_files(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("forward_seconds = [1, 1]\n")
    result = run("plan", path, "--devices", 8)
    assert (result.code, "--devices: only with a model's config.json" in result.message) == (2, True)


def test_a_page_shows_the_frontier_with_the_ranking(run: Run, config: Path) -> None:
    assert run("plan", config, *JOB, "--seconds", 0, "-o", "frontier.html").code == 0
    page = Path("frontier.html").read_text()
    record = run("plan", config, *JOB, "--seconds", 0, "--json").json
    rows = page.count('<tr id="plan-')
    assert rows == len(record["ranked"]) == page.count('<a href="#plan-')
    assert page.count('class="frontier"') == sum(each["on_frontier"] for each in record["ranked"])
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])  # noqa: S314 -- our own, well-formed


def test_jitter_and_memory_policies_take_part(run: Run, config: Path) -> None:
    given = [*JOB, "--jitter", 0.1, "--quantile", 0.9, "--offload", "--seconds", 0]
    text = "the 0.9 quantile of the slowest data parallel replica, steps vary by 10%"
    assert text in run("plan", config, *given).out
    record = run("plan", config, *given, "--json").json
    assert (record["jitter"], record["quantile"]) == (0.1, 0.9)
    assert all(each["seconds"] > each["seconds_without_jitter"] for each in record["ranked"])


@pytest.mark.full
def test_progress_is_shown_on_a_terminal(config: Path) -> None:
    assert b"best " in stderr_on_terminal(
        "plan", str(config), *map(str, JOB), "--seconds", "0", cwd=config.parent
    )
