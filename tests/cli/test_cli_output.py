"""Tests of what all commands share: exit codes, closed pipes, encodings, colour, missing extras."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli import app
from tests.support.command_line import (
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
        (["shwo"], "Did you mean 'show'?"),
        (["list", "--jsn"], "--json"),
        (["check"], "Missing argument"),
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


def test_the_exit_codes_of_a_process_are_0_1_and_2_and_there_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("0F0,0B0\n")
    (tmp_path / "malformed.csv").write_text("zz\n")
    for name, code in (("valid", 0), ("malformed", 1), ("missing", 2)):
        result = run_process("check", f"{name}.csv", cwd=tmp_path)
        assert result.code == code
        assert "Traceback" not in result.err


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
@small(lambda arguments: arguments[0] in ("show", "--help"))
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
    fast = {str(command.name) for command in app.registered_commands} - SLOW_COMMANDS
    assert {arguments[0] for arguments in COLOURED} >= fast


def colours(result: CommandResult) -> set[int]:
    codes = re.findall(r"\x1b\[([0-9;]*)m", result.out + result.err)
    return {number for code in codes for number in map(int, filter(None, code.split(";"))) if number >= 30}


@pytest.mark.parametrize("arguments", COLOURED, ids=" ".join)
def test_no_command_uses_colour_under_no_color_even_if_forced(
    arguments: list[str], coloured: Run, tmp_path: Path
) -> None:
    write_example_files(tmp_path)
    assert not colours(coloured(*arguments, NO_COLOR="1", FORCE_COLOR="1"))


def test_help_and_errors_of_a_process_use_no_colour_under_no_color_even_if_forced(tmp_path: Path) -> None:
    for arguments in (["--help"], ["shwo"]):  # typer reads the variables when it is loaded
        result = run_process(*arguments, cwd=tmp_path, environment={"NO_COLOR": "1", "FORCE_COLOR": "1"})
        assert not colours(result)


def test_commands_that_draw_use_colour_when_forced(coloured: Run, tmp_path: Path) -> None:
    for arguments in (COLOURED[2], COLOURED[6]):
        assert colours(coloured(*arguments, FORCE_COLOR="1"))
    assert colours(run_process("--help", cwd=tmp_path, environment={"FORCE_COLOR": "1"}))


# --- missing extras --------------------------------------------------------------------------------


def test_without_the_extra_view_a_line_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run("show", "1f1b", "-p", 2, "-m", 2, "-o", "x.png")
    assert result.code == 2
    assert result.err == (
        "penstock: PNG pictures are drawn by Pillow, which is not installed: "
        "pip install 'penstock[view]', or in a clone: pip install -e '.[view]' (SVG pictures need nothing)\n"
    )


@pytest.mark.parametrize("module", ["penstock.runtime", "penstock.pipelining"])
def test_without_the_extra_torch_a_line_says_what_to_install(module: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
try:
    import {module}
except ImportError as error:
    print(type(error).__name__, error)
"""
    result = run_python(code, tmp_path)
    assert result == (
        "MissingExtraError the runtime needs torch, which is not installed: "
        "pip install 'penstock[torch]', or in a clone: pip install -e '.[torch]'\n"
    )


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, encoding="utf-8", check=True
    )
    return done.stdout


def test_without_the_extra_search_an_order_is_found_and_a_line_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["numba"] = sys.modules["ortools"] = None
sys.argv = ["penstock", "search", "-p", "2", "-m", "3", "--live", "1", "--moves", "10"]
from penstock.cli import main
main()
"""
    result = run_python(code, tmp_path)
    assert "makespan" in result
    assert "not installed, so not used: " in result
    assert "pip install 'penstock[search]'" in result


def test_the_core_commands_need_no_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
sys.argv = ["penstock", "show", "1f1b", "-p", "2", "-m", "2"]
from penstock.cli import main
main()
"""
    assert "rank 1" in run_python(code, tmp_path)
