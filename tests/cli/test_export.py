"""Tests of `penstock export`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Run
from tests.support.model_configs import CONFIGS


def test_flags_are_printed_and_files_written(run: Run, tmp_path: Path) -> None:
    given = ("export", "torchtitan", "zb-h1", "-p", 2, "-m", 4, "--layers", 6, "-o", "out")
    result = run(*given, "--trainer-version", "0.2.2")
    assert result.code == 0
    flags = [line for line in result.out.splitlines() if not line.startswith("#")]
    stages = "tok_embeddings,layers.0,layers.1,layers.2 layers.3,layers.4,layers.5,norm,output"
    assert flags == [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=1F1B",
        "--parallelism.pipeline_parallel_schedule_csv=out/schedule.csv",
        "--parallelism.pipeline_parallel_microbatch_size=1",
        f"--parallelism.module_fqns_per_model_part {stages}",
        "--training.local_batch_size=4",
    ]
    assert result.out.endswith("# wrote out/schedule.csv, out/torchtitan.toml\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"schedule.csv", "torchtitan.toml"}
    newer = run(*given, "--trainer-version", "0.3.0")
    assert newer.out.endswith("# wrote out/schedule.csv, out/flags.txt\n")
    assert newer.out.startswith((tmp_path / "out" / "flags.txt").read_text().replace(" \\\n", "\n"))
    again = run("export", "megatron", "1f1b", "-p", 2, "-m", 4, "--layout", "Ettt|tttL")
    assert "--num-layers 6\n" in again.out


@pytest.mark.parametrize("model", [CONFIGS / "llama-3-8b.json", "llama-3-8b", "llama3-8b"])
def test_a_model_has_the_number_of_layers(run: Run, tmp_path: Path, model: object) -> None:
    given = ("export", "torchtitan", "zb-h1", "-p", 4, "-m", 8, "--model", model, "-o", "out")
    llama = run(*given, "--trainer-version", "0.2.2")
    assert llama.code == 0
    written = (tmp_path / "out" / "torchtitan.toml").read_text()
    assert '["tok_embeddings", "layers.0", ' in written
    assert '"layers.31", "norm", "output"' in written


def test_prediction_layers_are_given_to_the_trainer_that_has_them(run: Run) -> None:
    titan = run("export", "torchtitan", "1f1b", "-p", 4, "-m", 8, "--model", "deepseek-v3")
    assert "# torchtitan runs no MTP layers in pipelines: left out of deepseek-v3" in titan.out
    sizes = ("-p", 16, "-m", 32, "-v", 2, "--model", "deepseek-v3")
    deepseek = ("export", "megatron", "interleaved-1f1b", *sizes)
    assert "--mtp-num-layers 1\n" in run(*deepseek).out
    assert "'Et*3|(tt|)*29,m|L'" in run(*deepseek, "--layout", "Et*3|(tt|)*29,m|L").out
    assert "--layers is 3, but" in run(*deepseek, "--layers", 3).message


def test_a_model_that_torchtitan_does_not_have_is_refused_with_those_it_has(run: Run, tmp_path: Path) -> None:
    sizes = ("-p", 4, "-m", 8, "--model", "gpt2", "-o", "out")
    result = run("export", "torchtitan", "1f1b", *sizes, "--trainer-version", "0.2.2")
    assert (result.code, result.out) == (2, "")
    assert "torchtitan 0.2.2 has no gpt2 model" in result.message
    assert "give --layers 12 in place of --model" in result.message
    assert "it runs the model types llama, deepseek_v2, deepseek_v3" in result.message
    assert not (tmp_path / "out").exists()
    assert run("export", "torchtitan", "1f1b", "-p", 4, "-m", 8, "--layers", 12).code == 0
    assert run("export", "megatron", "1f1b", "-p", 4, "-m", 8, "--model", "gpt2").code == 0


def test_an_unknown_model_is_told_the_known_names(run: Run) -> None:
    for given in (
        ("export", "torchtitan", "1f1b", "-p", 2, "-m", 4, "--model", "lama-3-8b"),
        ("estimate", "lama-3-8b"),
        ("plan", "lama-3-8b", "--devices", 8, "--batch", 8),
    ):
        result = run(*given)
        assert (result.code, result.out) == (2, ""), result
        assert "no known model; give a config.json, or one of deepseek-v3, gpt2, " in result.message
        assert "did you mean llama-3-8b?" in result.message


def test_mistakes_are_explained(run: Run, tmp_path: Path) -> None:
    assert "give --layers" in run("export", "torchtitan", "1f1b", "-p", 2, "-m", 4).message
    sizes = ("-p", 2, "-m", 4, "--layers", 8, "--trainer-version")
    assert "is one of 0.2.2, 0.3.0 (given 0.1)" in run("export", "torchtitan", "1f1b", *sizes, "0.1").message
    other = run("export", "megatron", "1f1b", *sizes, "0.3.0").message
    assert "--trainer-version is a version of torchtitan; leave it out for megatron" in other
    result = run("export", "megatron", "zbv", "-p", 2, "-m", 4, "--layers", 8, "-o", "out")
    assert (result.code, result.out) == (2, "")
    assert "Megatron runs 1f1b, interleaved-1f1b, interleaved-overlap only" in result.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    invalid = run("export", "megatron", "mine.csv", "--layers", 8, "-o", "out")
    assert (invalid.code, invalid.err.startswith("penstock: mine has 1 violation\nerror[")) == (1, True)
    assert not (tmp_path / "out").exists()
