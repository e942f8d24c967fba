"""Tests of messages: nearest names, options as typed, files and keys, what was written, singular and plural."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "1f1c"], "unknown family '1f1c'; did you mean 1f1b?"),
        (["simulate", "1f1b", "-c", "zb-h4096-p8m24"], "did you mean zb-h4096-p8-m24?"),
        (["simulate", "1f1b", "--send-model", "rendevous"], "(given rendevous); did you mean rendezvous?"),
        (["search", "--objective", "makespam"], "(given makespam); did you mean makespan?"),
        (
            ["simulate", "1f1b", "-c", "keys.toml"],
            "keys.toml: forward: not a key of costs; did you mean forward_seconds?",
        ),
    ],
)
def test_a_misspelt_name_gets_the_nearest_one(
    arguments: list[str], message: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text("forward = 1\n")
    sizes = [] if arguments == ["show", "1f1c"] else ["-p", "2", "-m", "2"]
    result = run(*arguments, *sizes)
    assert result.code == 2
    assert message in result.message


@pytest.mark.parametrize(
    ("text", "meant"),
    [("0f0", "0F0"), ("F0", "0F0"), ("b3", "0B3"), ("1SENDF0", "1SEND_F0"), ("0unshard", "0UNSHARD")],
)
def test_a_text_that_is_almost_an_action_gets_that_action(
    text: str, meant: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "s.csv").write_text(f"{text}\n")
    result = run("check", "s.csv")
    assert result.code == 1
    assert f"s.csv: row 1, column 1: '{text}' is not an action" in result.err
    assert f"did you mean {meant}?" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "--live", "0"], "--live must be an integer of at least 1 (given 0)"),
        (
            ["search", "--live", "3", "--memory", "3"],
            "give --memory, in bytes, or --live, in activations, not both",
        ),
        (["simulate", "1f1b", "--jitter", "7"], "--jitter must be a share from 0 to 1 (given 7.0)"),
        (["search", "--jitter", "0.1", "--objective", "span"], "only (given --objective span)"),
    ],
)
def test_messages_name_the_options_that_were_typed(arguments: list[str], message: str, run: Run) -> None:
    result = run(*arguments, "-p", 2, "-m", 2)
    assert result.code == 2
    assert message in result.message


def test_costs_of_a_file_that_do_not_fit_are_named_by_file_and_key(run: Run, tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("forward_seconds = [1, 2]\n")
    result = run("simulate", "1f1b", "-p", 3, "-m", 2, "-c", "costs.toml")
    assert result.err == "penstock: costs.toml: forward_seconds: 2 entries, but the schedule has 3 stages\n"


def test_a_family_can_be_checked(run: Run) -> None:
    result = run("check", "zbv", "-p", 2, "-m", 2, "--lowered")
    assert result.code == 0
    assert result.out.startswith("zbv: valid (2 ranks, 4 stages, 2 microbatches, ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["show", "1f1b", "-p", 1, "-m", 1, "-o", "a.svg"],
            "wrote a.svg: 1f1b, 1 rank, 1 microbatch, 1 stage per rank",
        ),
        (["compare", "1f1b", "-p", 2, "-m", 2, "-o", "a.html"], "wrote a.html"),
        (["trace", "1f1b", "-p", 1, "-m", 1, "-o", "a.json"], "wrote a.json: 2 steps on 1 rank; open it"),
        (["search", "-p", 2, "-m", 2, "--moves", 0, "-o", "a.csv"], "wrote a.csv"),
    ],
)
def test_a_success_says_what_it_wrote(arguments: list[object], said: str, run: Run, tmp_path: Path) -> None:
    result = run(*arguments)
    assert (result.code, result.err) == (0, "")
    assert said in result.out
    assert (tmp_path / str(arguments[-1])).exists()


def test_json_on_stdout_stays_json_when_a_file_is_written(run: Run) -> None:
    result = run("search", "-p", 2, "-m", 2, "--moves", 0, "-o", "a.csv", "--json")
    assert result.json["time_unit"] == "units"
    assert result.err == "wrote a.csv\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "1f1b", "--jitter", "5%"], "--jitter must be a number (given 5%)"),
        (["simulate", "1f1b", "--ranks", "four"], "--ranks must be an integer (given four)"),
        (["plan", "x.json", "--top", "0"], "--top must be at least 1 (given 0)"),
        (
            ["export", "megatronn", "1f1b"],
            "TRAINER is one of torchtitan, megatron (given megatronn); did you mean megatron?",
        ),
        (
            ["plan", "x.json", "--divices", "3"],
            "no such option: --divices; did you mean --devices? (see penstock plan --help)",
        ),
        (["search", "--time", "5"], "no such option: --time (see penstock search --help)"),
        (["search", "-p2", "-m2", "--quantile", "2"], "--quantile needs --jitter: without it no step varies"),
        (
            ["plan", "llama-3-8b", "--devices", "8", "--batch", "8", "--quantile", "0.9"],
            "--quantile needs --jitter: without it no step varies",
        ),
        (["demo", "--ranks", "99"], "--ranks must be at most 8 (given 99)"),
        (
            ["simulate", "1f1b", "--send-model", "x"],
            "--send-model is one of buffered, edge-streams, pair-streams, shared-stream, rendezvous (given x)",
        ),
        (
            ["search", "--objective", "spann"],
            "--objective is one of makespan, span, period (given spann); did you mean span?",
        ),
        (
            ["search", "--memory", "80gb"],
            "--memory is a number of bytes, e.g. 80e9, 80GB or 74.5GiB (given 80gb)",
        ),
        (
            ["export"],
            "missing argument 'torchtitan|megatron' (see penstock export --help)",
        ),
        (["simulate"], "missing argument 'NAME|FILE' (see penstock simulate --help)"),
        (["doctr"], "no such command 'doctr'; did you mean 'doctor'? (see penstock --help)"),
        (["show", "1f1b", "zbv"], "got unexpected extra argument(s) (zbv) (see penstock show --help)"),
        (["show", "1f1b"], "1f1b needs --ranks and --microbatches, e.g. 1f1b --ranks 4 --microbatches 8"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, run: Run) -> None:
    result = run(*arguments)
    assert (result.code, result.out, result.err) == (2, "", f"penstock: {message}\n")
