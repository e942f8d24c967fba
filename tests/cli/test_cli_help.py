"""Tests of what all commands share: help, examples, version and shell completion."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import penstock
from penstock.cli import SUMMARIES, load_command
from tests.support.command_line import SLOW_COMMANDS, Run, write_example_files
from tests.support.grids import small

EXAMPLES = [
    line.strip()
    for command in SUMMARIES
    for line in str(load_command(command).help).partition("Examples:")[2].splitlines()
    if line.strip()
]
FIRST_OF_EACH_COMMAND = {line.split()[1]: line for line in reversed(EXAMPLES)}.values()


# --- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_help_of_every_command_has_its_examples_one_per_line(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    mine = [line for line in EXAMPLES if line.split()[1] == command]
    assert mine
    shown = run(command, "--help").out
    assert set(mine) <= {line.strip() for line in shown.splitlines()}


@pytest.mark.parametrize("line", [line for line in EXAMPLES if not SLOW_COMMANDS & set(line.split())])
@small(lambda line: line in FIRST_OF_EACH_COMMAND)
def test_the_examples_in_the_help_run(line: str, run: Run, tmp_path: Path) -> None:
    write_example_files(tmp_path)
    program, *arguments = shlex.split(line)
    result = run(*arguments)
    assert program == "penstock"
    assert (result.code, result.err) == (0, "")


def test_flags_have_no_type_in_the_help(run: Run) -> None:
    for arguments in (["--help"], ["simulate", "--help"]):
        shown = run(*arguments).out
        assert "<int>" in shown or len(arguments) == 1
        assert "bool" not in shown


def test_help_starts_with_usage_and_names_every_command_and_a_first_example(run: Run) -> None:
    result = run("--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.split()[:2] == ["Usage:", "penstock"]
    assert all(command in result.out for command in SUMMARIES)
    assert "penstock show 1f1b --ranks 4 --microbatches 8" in result.out


@pytest.mark.parametrize(
    ("command", "option"),
    [("list", "--help"), ("show", "-h"), ("check", "--help"), ("verify-grads", "-h"), ("demo", "-h")],
)
def test_help_and_h_show_examples(command: str, option: str, run: Run) -> None:
    result = run(command, option)
    assert result.code == 0
    assert "Examples:" in result.out
    assert f" penstock {command}" in result.out.partition("Examples:")[2]


def test_the_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert (result.code, result.out) == (0, f"penstock {penstock.__version__}\n")


# --- completion ------------------------------------------------------------------------------------


def ask_to_complete(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Set what bash sets when it asks for the completions of a partial line."""
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock si", {"simulate"}),
        ("penstock ", set(SUMMARIES)),
        ("penstock show zb", {"zb-h1", "zb-h2", "zbv"}),
        ("penstock compare 1f1b ea", {"eager-1f1b"}),
        ("penstock simulate 1f1b --mic", {"--microbatches"}),
        ("penstock show 1f1b --costs zb-h4096-p8-m24", {"zb-h4096-p8-m24"}),
    ],
)
def test_bash_completes_commands_families_options_and_presets(
    line: str, expected: set[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_to_complete(monkeypatch, line)
    result = run()
    assert (set(result.out.split()), result.err) == (expected, "")


def test_completion_can_be_installed_and_shown(run: Run) -> None:
    shown = run("--help").out
    assert "--install-completion" in shown
    assert "--show-completion" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion_script_that_calls_penstock(
    shell: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", f"source_{shell}")
    result = run()
    assert (result.code, result.err) == (0, "")
    assert f"_PENSTOCK_COMPLETE=complete_{shell}" in result.out
