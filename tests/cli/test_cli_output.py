"""Tests of what all commands share: exit codes, closed pipes, encodings, colour, missing extras."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import penstock
from penstock.cli import SUMMARIES
from tests.support.command_line import (
    COLOUR_VARIABLES,
    EXECUTABLE,
    SLOW_COMMANDS,
    CommandResult,
    Run,
    run_process,
    write_example_files,
)
from tests.support.grids import small

SHOW = ("show", "1f1b", "-p", "2", "-m", "2")


# --- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["shwo"], "did you mean 'show'?"),
        (["list", "--jsn"], "--json"),
        (["check"], "missing argument"),
        (["list", "1f1b"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_exits_with_2_and_suggests_a_correction(
    arguments: list[str], expected: str, run: Run
) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert expected in result.message
    assert result.out == ""


def test_the_exit_codes_are_0_1_and_2_and_there_is_no_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("0F0,0B0\n")
    (tmp_path / "malformed.csv").write_text("zz\n")
    for name, code in (("valid", 0), ("malformed", 1), ("missing", 2)):
        result = run("check", f"{name}.csv")
        assert result.code == code
        assert "Traceback" not in result.err
    process = run_process("check", "malformed.csv", cwd=tmp_path)
    assert process == run("check", "malformed.csv")


def test_the_package_can_be_executed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)  # noqa: S603
    assert (done.returncode, done.stdout) == (0, f"penstock {penstock.__version__}\n")


# --- pipes and encodings ---------------------------------------------------------------------------


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(tmp_path: Path) -> None:
    result = run_process(*SHOW, cwd=tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    assert (result.code, result.err) == (0, "")
    assert "rank 0  F0 F1 ?  ?  B0??? ?  B1???" in result.out


@pytest.mark.parametrize("arguments", [["list"], ["--help"], SHOW, ["check", "valid.csv"]], ids=" ".join)
@small(lambda arguments: arguments[0] == "show")
def test_a_closed_pipe_is_not_an_error(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("0F0,0B0\n")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = run_process(*arguments, cwd=tmp_path, stdout=writing)
    finally:
        os.close(writing)
    assert result.err == ""
    assert result.code == -signal.SIGPIPE  # neither valid nor invalid


def test_head_closes_a_long_picture_without_a_message() -> None:
    line = f"'{EXECUTABLE}' show gpipe -p 8 -m 500 | head -n 1"
    result = subprocess.run(line, shell=True, capture_output=True, encoding="utf-8", check=False)  # noqa: S602
    assert result.stdout == "gpipe: 8 ranks, 8 stages (loop), 500 microbatches, compute\n"
    assert result.stderr == ""


# --- colour ----------------------------------------------------------------------------------------


@pytest.fixture
def coloured(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with variables that ask for colour."""

    def run_command(*arguments: str, **environment: str) -> CommandResult:
        with monkeypatch.context() as changed:
            for name, value in environment.items():
                changed.setenv(name, value)
            return run(*arguments)

    return run_command


@pytest.mark.parametrize("asked", [{}, {"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}], ids=str)
def test_no_colour_in_a_pipe_or_under_no_color(asked: dict[str, str], coloured: Run) -> None:
    out = coloured(*SHOW, **asked).out
    styles = {int(n) for code in re.findall(r"\x1b\[([0-9;]*)m", out) for n in code.split(";")}
    assert styles <= {0, 2}  # dim is not a colour
    assert bool(styles) == ("FORCE_COLOR" in asked)


def test_colour_in_a_pipe_when_forced(coloured: Run) -> None:
    assert "\x1b[30;104mF0" in coloured(*SHOW, FORCE_COLOR="1").out


COLOURED = [
    ["--help"],
    ["list"],
    ["show", "zbv", "-p", "2", "-m", "4"],
    ["show", "zbv", "-p", "2", "-m", "4", "--costs", "costs.toml"],
    ["show", "zbv", "-p", "2", "-m", "4", "--lowered"],
    ["check", "mine.csv"],
    ["simulate", "1f1b", "-p", "2", "-m", "4"],
    ["compare", "1f1b", "zb-h1", "-p", "2", "-m", "4"],
    ["trace", "1f1b", "-p", "2", "-m", "4"],
    ["export", "megatron", "1f1b", "-p", "2", "-m", "4", "--layers", "4"],
    ["estimate", "config.json"],
    ["shwo"],
]


def test_every_fast_command_is_covered() -> None:
    assert {arguments[0] for arguments in COLOURED} >= set(SUMMARIES) - SLOW_COMMANDS


def colours(result: CommandResult) -> set[int]:
    codes = re.findall(r"\x1b\[([0-9;]*)m", result.out + result.err)
    return {number for code in codes for number in map(int, filter(None, code.split(";"))) if number >= 30}


@pytest.mark.parametrize("arguments", COLOURED, ids=" ".join)
def test_no_command_uses_colour_under_no_color_even_if_forced(
    arguments: list[str], coloured: Run, tmp_path: Path
) -> None:
    write_example_files(tmp_path)
    assert not colours(coloured(*arguments, NO_COLOR="1", FORCE_COLOR="1"))


@pytest.mark.parametrize("forbidden", [True, False])
def test_the_help_of_a_process_has_colour_only_if_forced_without_no_color_and_errors_never(
    *, forbidden: bool, tmp_path: Path
) -> None:
    code = """
import sys
from penstock.cli import main
for sys.argv[1:] in (["--help"], ["shwo"]):
    try:
        main()
    except SystemExit:
        sys.stderr.flush()
"""  # typer reads the variables when it is loaded
    environment = {"FORCE_COLOR": "1", **({"NO_COLOR": "1"} if forbidden else {})}
    done = start_python(code, tmp_path, environment)
    assert "Usage: " in done.stdout
    assert "did you mean 'show'?" in done.stderr
    assert bool(colours(CommandResult(0, done.stdout, ""))) == (not forbidden)
    assert not colours(CommandResult(0, done.stderr, ""))


def test_commands_that_draw_use_colour_when_forced(coloured: Run) -> None:
    for arguments in (COLOURED[2], COLOURED[6]):
        assert colours(coloured(*arguments, FORCE_COLOR="1"))


# --- missing extras --------------------------------------------------------------------------------


def test_without_the_extra_view_a_line_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run("show", "1f1b", "-p", 2, "-m", 2, "-o", "x.png")
    assert result.code == 2
    assert result.err == (
        "penstock: PNG pictures are drawn by Pillow, which is not installed: "
        "pip install 'penstock[view]', or in a clone: pip install -e '.[view]' (SVG pictures need nothing)\n"
    )


def start_python(
    code: str, cwd: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if name not in COLOUR_VARIABLES}
    return subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**ours, **environment},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )


def test_without_the_extra_torch_commands_work_and_the_runtime_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
for module in ("penstock.runtime", "penstock.pipelining"):
    try:
        __import__(module)
    except ImportError as error:
        print(type(error).__name__, error)
sys.argv = ["penstock", "show", "1f1b", "-p", "2", "-m", "2"]
from penstock.cli import main
main()
"""
    *messages, picture = start_python(code, tmp_path).stdout.split("\n", 2)
    message = (
        "MissingExtraError the runtime needs torch, which is not installed: "
        "pip install 'penstock[torch]', or in a clone: pip install -e '.[torch]'"
    )
    assert messages == [message, message]
    assert "rank 1" in picture


def test_without_the_extra_search_an_order_is_found_and_a_line_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["numba"] = sys.modules["ortools"] = None
sys.argv = ["penstock", "search", "-p", "2", "-m", "3", "--live", "1", "--moves", "10"]
from penstock.cli import main
main()
"""
    result = start_python(code, tmp_path).stdout
    assert "makespan" in result
    assert "not installed, so not used: " in result
    assert "pip install 'penstock[search]'" in result
