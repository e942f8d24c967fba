"""Tests of `penstock verify-grads`: it finds and names what a pipeline trains differently from one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import penstock
from tests.support.command_line import Run
from tests.support.verified_models import MODELS


@pytest.fixture
def verify(run: Run, tmp_path: Path) -> Run:
    """The command in a directory that has a module of models."""
    (tmp_path / "models.py").write_text(MODELS)

    def run_verify(function: str, *arguments: object) -> object:
        has_files = any(str(argument).endswith((".csv", ".json")) for argument in arguments)
        sizes = () if has_files else ("-p", 2, "-m", 4)
        return run("verify-grads", function, *arguments, *sizes)

    return run_verify  # type: ignore[return-value]


def test_a_model_that_pipelines_train_alike_is_equal_for_every_family(verify: Run) -> None:
    result = verify("models:right", "--all")
    assert result.code == 0
    head, *rows = result.out.splitlines()
    assert head.split() == ["schedule", "loss", "gradient", "norm", "parameters", "worst", "gradient"]
    assert [row.split()[0] for row in rows] == [name for name in penstock.families() if name != "forward-only"]
    assert all(" equal " in row for row in rows)


def test_in_float64_errors_are_those_of_float64(verify: Run) -> None:
    (row,) = verify("models:right_in_double", "zb-h1", "--steps", 3, "--json").json["schedules"]
    assert row["tolerance"] == 1e-9
    assert row["worst_gradient"]["error"] < 1e-12


def test_a_wrong_gradient_is_named_and_the_exit_code_is_1(verify: Run) -> None:
    result = verify("models:planted", "1f1b", "zbv")
    assert result.code == 1
    assert result.out.count("NOT EQUAL") == 2
    assert "2 of 2 differ from one process; worst: the gradient of 3.weight (stage 1 of" in result.out
    assert ", relative error 0.5; allowed: 0.0001" in result.out
    first = verify("models:planted", "1f1b", "--json").json["schedules"][0]
    assert (first["worst_gradient"]["name"], first["worst_gradient"]["stage"]) == ("3.weight", 1)
    assert first["worst_gradient"]["error"] == pytest.approx(0.5, rel=1e-3)
    assert first["loss_error"] < 1e-3  # of the second step alone


@pytest.mark.full
def test_a_model_that_depends_on_the_split_of_the_batch_is_distinguished(verify: Run) -> None:
    cut = verify("models:normed", "1f1b", "--json")
    assert (cut.code, cut.json["equal"]) == (1, False)
    assert "depends on how a batch is split, as BatchNorm does" in cut.json["schedules"][0]["cause"]
    other = verify("models:by_process", "1f1b", "--json").json["schedules"][0]
    assert other["worst_gradient"] == {"name": "3.weight", "stage": 1, "step": 1, "error": None}
    assert "one process that computes the same microbatches gets different numbers, too" in other["cause"]
    dropped = verify("models:dropped", "1f1b", "--json").json["schedules"][0]
    assert "the model draws random numbers, as dropout does" in dropped["cause"]


def test_a_tolerance_that_needs_float64_is_reported(verify: Run) -> None:
    row = verify("models:right", "1f1b", "--tolerance", 1e-8, "--json").json["schedules"][0]
    assert not row["equal"]
    assert row["cause"] == "that may be rounding: model.double() and inputs in float64 would show it"


def test_a_loss_with_weights_of_its_own_is_compared_too(verify: Run) -> None:
    assert verify("models:with_loss", "1f1b").code == 0


def test_hand_written_stages_with_keywords_dicts_and_tokens_are_equal(verify: Run) -> None:
    result = verify("models:hand_written", "1f1b", "zbv", "--json")
    assert (result.code, [row["stages"] for row in result.json["schedules"]]) == (0, [2, 4])
    assert result.json["schedules"][1]["worst_gradient"]["name"].split(".")[1] == "layer"
    uncounted = verify("models:uncounted", "1f1b")
    assert uncounted.code == 2
    assert "or return tokens, a function that counts the tokens" in " ".join(uncounted.out.split())


def test_hand_written_stages_may_share_a_weight(verify: Run) -> None:
    assert verify("models:tied", "1f1b").code == 0


def test_another_number_of_stages_than_the_schedule_has_is_rejected(verify: Run) -> None:
    result = verify("models:two_stages", "1f1b", "zbv")
    assert result.code == 1
    assert "zbv: the function returns 2 stages, but the schedule has 4" in result.out


@pytest.mark.parametrize("function", ["named_llama", "llama"])
@pytest.mark.full  # every rank loads transformers
def test_a_decoder_of_transformers_is_equal_with_arguments_by_name_or_place(verify: Run, function: str) -> None:
    result = verify(f"models:{function}", "1f1b", "zbv")
    assert result.code == 0
    assert "model.layers." in result.out


def test_files_of_other_numbers_of_ranks_go_together(verify: Run, tmp_path: Path) -> None:
    penstock.build("1f1b", ranks=1, microbatches=2).write(tmp_path / "one.csv")
    penstock.build("zb-h1", ranks=3, microbatches=4).write(tmp_path / "three.json")
    rows = verify("models:right", "three.json", "one.csv", "--json").json["schedules"]
    assert [(row["schedule"], row["ranks"], row["equal"]) for row in rows] == [
        ("zb-h1", 3, True),
        ("one", 1, True),
    ]


def test_schedules_that_cannot_run_are_reported_with_the_reason(verify: Run) -> None:
    for function, expected in (
        ("branches", "Branches is not an nn.Sequential"),
        ("uneven", "9 rows cannot be split into 4 microbatches of the same size"),
        ("unseeded", "the function returns other weights or another batch each time it is called"),
    ):
        result = verify(f"models:{function}", "1f1b")
        assert result.code == 2
        assert "rejected" in result.out
        assert expected in " ".join(result.out.split())
        assert "Traceback" not in result.out + result.err
    assert "forward-only: it has no backward" in verify("models:right", "forward-only").out
    some = verify("models:right", "1f1b", "interleaved-1f1b", "-v", 4)
    assert some.code == 1
    assert "8 stages need at least 8 modules, but the model runs 6 in sequence" in some.out


def test_stages_over_a_graph_are_equal_with_several_sources_and_sinks(verify: Run, tmp_path: Path) -> None:
    graph = penstock.StageGraph.parse("0>1,1>2,0>2,1>3")
    penstock.build("1f1b", graph=graph, ranks=2, microbatches=4).write(tmp_path / "heads.json")
    (row,) = verify("models:two_heads", "heads.json", "--json").json["schedules"]
    assert row["equal"], row
    assert verify("models:two_sources", "gpipe", "--graph", "0>2,1>2", "-p", 1, "-m", 4).code == 0


def test_stages_of_a_traced_module_keep_their_graph_with_every_family(verify: Run) -> None:
    result = verify("models:traced", "1f1b", "zbv", "--json", "-v", 2)
    assert [row["equal"] for row in result.json["schedules"]] == [False, True]
    assert "returns 4 stages, but the schedule has 2" in result.json["schedules"][0]["rejected"]


def test_a_traced_module_is_divided_evenly_over_the_stages(verify: Run) -> None:
    rows = verify("models:traced_model", "1f1b", "zbv", "--json").json["schedules"]
    assert [(row["stages"], row["equal"]) for row in rows] == [(2, True), (4, True)]
    assert rows[1]["worst_gradient"]["name"].partition(".")[0] in {"down", "middle", "up", "head"}


def test_a_model_cannot_be_divided_over_another_graph_than_a_chain(verify: Run, tmp_path: Path) -> None:
    graph = penstock.StageGraph(3, ((0, 1), (1, 2), (0, 2)))
    penstock.build("1f1b", graph=graph, ranks=2, microbatches=4).write(tmp_path / "skip.json")
    result = verify("models:right", "skip.json")
    assert result.code == 2
    assert "return stages, one module for each stage, instead of a model" in " ".join(result.out.split())


@pytest.mark.full
def test_functions_that_are_not_as_they_should_be_are_bad_usage(verify: Run) -> None:
    for function, expected in (
        ("models", "models is not of the form module:function: write models:function"),
        ("models.py:right", "models.py:right is not of the form module:function: write models:right"),
        ("nowhere:right", "there is no module nowhere in"),
        ("models:left", "models has no function left; the functions of models are: layers, Scaled"),
        ("models:number", "models.number is not a function"),
        ("models:three", "(model, loss, inputs, target), or a dict of them, but it returned 3 values"),
        ("models:nothing", "but there is a int; the loss must be a function"),
        (
            "models:misnamed",
            "unknown: modle, los; the names are model, stages, loss, inputs, kwargs, target, tokens; it must",
        ),
        (
            "models:misshapen",
            "in one process, without a pipeline, the model or the loss raised RuntimeError: mat1",
        ),
        ("models:many", "the loss must be a tensor with one number, but it has shape [8, 2]"),
        ("models:frozen", "the loss depends on no trained parameter"),
        ("models:raising", "models:raising() raised NameError: name 'undefined' is not defined ("),
    ):
        result = verify(function, "1f1b")
        assert (result.code, result.out) == (2, "")
        assert expected in result.message
        assert "Traceback" not in result.err


def test_numbers_and_names_that_cannot_be_are_bad_usage(run: Run) -> None:
    for arguments, expected in (
        (["1f1b", "--steps", 0, "-p", 2, "-m", 2], "--steps must be at least 1 (given 0)"),
        (
            ["1f1b", "--tolerance", 0, "-p", 2, "-m", 2],
            "--tolerance must be a relative error above 0, e.g. 1e-4 (given 0)",
        ),
        (["1f1b", "--all", "-p", 2, "-m", 2], "--all selects every family: remove it, or the names"),
        (["-p", 2, "-m", 2], "name the schedules, e.g. 1f1b zbv, or give --all"),
        (["1f1b"], "1f1b needs --ranks and --microbatches"),
    ):
        result = run("verify-grads", "models:right", *arguments)
        assert (result.code, result.out) == (2, "")
        assert expected in result.message


def test_without_torch_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("penstock.runtime")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("verify-grads", "models:right", "1f1b", "-p", 2, "-m", 2)
    assert (result.code, result.out) == (2, "")
    assert "torch, which is not installed: pip install 'penstock[torch]'" in result.message
