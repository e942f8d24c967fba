from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import penstock
from tests.cli.conftest import COMMAND, Run, in_a_process

WORDS = ("list", "show", "check", "verify-grads", "demo")


# --- list ------------------------------------------------------------------------------------------


def test_list_names_every_family_with_a_line_on_it(run: Run) -> None:
    answer = run("list")
    assert answer.code == 0
    head, *lines = answer.out.splitlines()
    assert head.split() == ["name", "stages", "per", "rank", "what", "it", "is"]
    assert [line.split()[0] for line in lines] == list(penstock.families())
    assert all(family.summary in answer.out for family in penstock.families().values())


def test_list_in_json_has_the_documented_keys(run: Run) -> None:
    answer = run("list", "--json")
    assert answer.code == 0
    assert [family["name"] for family in answer.json] == list(penstock.families())
    for family in answer.json:
        assert set(family) == {"name", "summary", "stages_per_rank", "aliases"}


# --- what all words share --------------------------------------------------------------------------


def test_help_starts_with_what_it_is_and_names_every_word_and_a_first_command(tmp_path: Path) -> None:
    answer = in_a_process("--help", cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split()[:2] == ["Usage:", "penstock"]
    assert all(word in answer.out for word in WORDS)
    assert "penstock show 1f1b --ranks 4 --microbatches 8" in answer.out


@pytest.mark.parametrize(
    ("word", "option"),
    [("list", "--help"), ("show", "-h"), ("check", "--help"), ("verify-grads", "-h"), ("demo", "-h")],
)
def test_the_help_of_every_word_has_examples(word: str, option: str, tmp_path: Path) -> None:
    answer = in_a_process(word, option, cwd=tmp_path)
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert f" penstock {word}" in answer.out.partition("Examples:")[2]


def test_the_version_is_printed(run: Run) -> None:
    answer = run("--version")
    assert (answer.code, answer.out) == (0, f"penstock {penstock.__version__}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shwo"], "Did you mean 'show'?"),
        (["list", "--jsn"], "--json"),
        (["check"], "Missing argument"),
        (["list", "1f1b"], "unexpected extra argument"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_was_meant(words: list[str], says: str, run: Run) -> None:
    answer = run(*words)
    assert answer.code == 2
    assert says in answer.said
    assert answer.out == ""


def test_the_exit_codes_of_a_process_are_0_1_and_2_and_there_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "right.csv").write_text("0F0,0B0\n")
    (tmp_path / "wrong.csv").write_text("0B0,0F0\n")
    (tmp_path / "malformed.csv").write_text("zz\n")
    for name, code in (("right", 0), ("wrong", 1), ("malformed", 1), ("missing", 2)):
        answer = in_a_process("check", f"{name}.csv", cwd=tmp_path)
        assert answer.code == code
        assert "Traceback" not in answer.err


SHOW = ("show", "1f1b", "-p", "2", "-m", "2")


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(tmp_path: Path) -> None:
    answer = in_a_process(*SHOW, cwd=tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    assert (answer.code, answer.err) == (0, "")
    assert "rank 0  F0 F1 ?  ?  B0??? ?  B1???" in answer.out


@pytest.mark.parametrize("words", [["list"], ["--help"], SHOW, ["check", "right.csv"]], ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_fault(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "right.csv").write_text("0F0,0B0\n")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        answer = in_a_process(*words, cwd=tmp_path, stdout=writing)
    finally:
        os.close(writing)
    assert answer.err == ""
    assert answer.code == -signal.SIGPIPE  # neither right nor wrong


def test_head_closes_a_long_picture_without_a_word() -> None:
    line = f"'{COMMAND}' show gpipe -p 8 -m 2000 | head -n 1"
    answer = subprocess.run(line, shell=True, capture_output=True, encoding="utf-8", check=False)  # noqa: S602
    assert answer.stdout == "gpipe: 8 ranks, 8 stages (loop), 2000 microbatches, compute\n"
    assert answer.stderr == ""


@pytest.mark.parametrize("asked", [{}, {"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}], ids=str)
def test_no_colour_where_nobody_sees_it_or_nobody_wants_it(asked: dict[str, str], tmp_path: Path) -> None:
    out = in_a_process(*SHOW, cwd=tmp_path, environment=asked).out
    styles = {int(n) for code in re.findall(r"\x1b\[([0-9;]*)m", out) for n in code.split(";")}
    assert styles <= {0, 2}  # dim is not a colour
    assert bool(styles) == ("FORCE_COLOR" in asked)


def test_colour_where_it_is_asked_for(tmp_path: Path) -> None:
    assert "\x1b[30;104mF0" in in_a_process(*SHOW, cwd=tmp_path, environment={"FORCE_COLOR": "1"}).out
