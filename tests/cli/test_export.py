"""Tests of `penstock export`."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import Run


def test_flags_are_printed_and_files_written(run: Run, tmp_path: Path) -> None:
    result = run("export", "torchtitan", "zb-h1", "-p", 2, "-m", 4, "--layers", 6, "-o", "out")
    assert result.code == 0
    flags = [line for line in result.out.splitlines() if not line.startswith("#")]
    assert flags == [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=1F1B",
        "--parallelism.pipeline_parallel_schedule_csv=out/schedule.csv",
        "--parallelism.pipeline_parallel_microbatch_size=1",
        "--training.local_batch_size=4",
    ]
    assert result.out.endswith("# wrote out/schedule.csv, out/torchtitan.toml\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"schedule.csv", "torchtitan.toml"}
    again = run("export", "megatron", "1f1b", "-p", 2, "-m", 4, "--layout", "Ettt|tttL")
    assert "--num-layers 6\n" in again.out


def test_a_model_config_has_the_number_of_layers(run: Run, tmp_path: Path) -> None:
    configs = Path(__file__).parents[2] / "examples" / "configs"
    llama = run(
        "export", "torchtitan", "zb-h1", "-p", 4, "-m", 8, "--model", configs / "llama-3-8b.json", "-o", "out"
    )
    assert llama.code == 0
    assert '"layers.31", "norm", "output"' in (tmp_path / "out" / "torchtitan.toml").read_text()
    sizes = ("-p", 16, "-m", 32, "-v", 2, "--model", configs / "deepseek-v3.json")
    deepseek = ("export", "megatron", "interleaved-1f1b", *sizes)
    assert "--mtp-num-layers 1\n" in run(*deepseek).out
    assert "'Et*3|(tt|)*29,m|L'" in run(*deepseek, "--layout", "Et*3|(tt|)*29,m|L").out
    assert "--layers is 3, but" in run(*deepseek, "--layers", 3).message


def test_mistakes_are_explained(run: Run, tmp_path: Path) -> None:
    assert "give --layers" in run("export", "torchtitan", "1f1b", "-p", 2, "-m", 4).message
    result = run("export", "megatron", "zbv", "-p", 2, "-m", 4, "--layers", 8, "-o", "out")
    assert (result.code, result.out) == (2, "")
    assert "Megatron runs 1f1b, interleaved-1f1b, interleaved-overlap only" in result.err
    assert not (tmp_path / "out").exists()
