"""Promise: `penstock` behaves as users of a shell expect: completion, examples, colour, missing extras."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import app
from penstock.lowering import DeferReceives
from tests.cli.conftest import Answer, Run, in_a_process

WORDS: dict[str, Any] = {str(word.name): word.callback for word in app.registered_commands}
EXAMPLES = [
    line.strip()
    for callback in WORDS.values()
    for line in str(callback.__doc__).partition("Examples:")[2].splitlines()
    if line.strip()
]
SLOW = {"demo", "doctor", "plan", "search", "verify-grads"}
"""Words that start processes, or take their time: their own tests run them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that examples speak of."""
    made = penstock.build("1f1b", ranks=2, microbatches=4)
    for name in ("mine.csv", "mine.json", "other.csv"):
        made.write(tmp_path / name)
    penstock.build("zbv", ranks=4, microbatches=8).write(tmp_path / "zbv.csv")
    DeferReceives(past_sends=True)(penstock.lower(made)).write(tmp_path / "deferred.csv")
    (tmp_path / "costs.toml").write_text("forward_seconds = 2\n")
    return tmp_path


# --- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_examples_in_its_help_one_to_a_line(word: str, tmp_path: Path) -> None:
    mine = [line for line in EXAMPLES if line.split()[1] == word]
    assert mine
    shown = in_a_process(word, "--help", cwd=tmp_path, environment={"COLUMNS": "120"}).out
    assert set(mine) <= {line.strip() for line in shown.splitlines()}


@pytest.mark.parametrize("line", [line for line in EXAMPLES if line.split()[1] not in SLOW])
def test_the_examples_in_the_help_run(line: str, run: Run, folder: Path) -> None:
    program, *words = shlex.split(line)
    answer = run(*words)
    assert program == "penstock"
    assert (answer.code, answer.err) == (0, ""), folder


# --- completion ------------------------------------------------------------------------------------


def offered(line: str, tmp_path: Path) -> list[str]:
    """What bash is given for a line that is being typed."""
    environment = {
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    answer = in_a_process(cwd=tmp_path, environment=environment)
    assert answer.err == ""
    return answer.out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock si", {"simulate"}),
        ("penstock ", set(WORDS)),
        ("penstock show zb", {"zb-h1", "zb-h2", "zbv"}),
        ("penstock compare 1f1b ea", {"eager-1f1b"}),
        ("penstock simulate 1f1b --mic", {"--microbatches"}),
        ("penstock show 1f1b --costs zb-h4096-p8-m24", {"zb-h4096-p8-m24"}),
    ],
)
def test_bash_is_offered_words_families_options_and_presets(
    line: str, expected: set[str], tmp_path: Path
) -> None:
    assert set(offered(line, tmp_path)) == expected


def test_completion_can_be_installed_and_shown(tmp_path: Path) -> None:
    shown = in_a_process("--help", cwd=tmp_path).out
    assert "--install-completion" in shown
    assert "--show-completion" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_calls_penstock(shell: str, tmp_path: Path) -> None:
    answer = in_a_process(cwd=tmp_path, environment={"_PENSTOCK_COMPLETE": f"source_{shell}"})
    assert (answer.code, answer.err) == (0, "")
    assert f"_PENSTOCK_COMPLETE=complete_{shell}" in answer.out


# --- colour ----------------------------------------------------------------------------------------

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
    ["shwo"],
]


def test_every_quick_word_is_looked_at() -> None:
    assert {words[0] for words in COLOURED} >= set(WORDS) - SLOW


def colours(answer: Answer) -> set[int]:
    codes = re.findall(r"\x1b\[([0-9;]*)m", answer.out + answer.err)
    return {number for code in codes for number in map(int, filter(None, code.split(";"))) if number >= 30}


@pytest.mark.parametrize("words", COLOURED, ids=" ".join)
def test_no_word_uses_colour_under_no_color_even_if_forced(words: list[str], folder: Path) -> None:
    assert not colours(in_a_process(*words, cwd=folder, environment={"NO_COLOR": "1", "FORCE_COLOR": "1"}))


def test_words_that_draw_use_colour_when_forced(folder: Path) -> None:
    for words in (COLOURED[0], COLOURED[2], COLOURED[6]):
        assert colours(in_a_process(*words, cwd=folder, environment={"FORCE_COLOR": "1"}))


# --- missing extras --------------------------------------------------------------------------------


def test_without_the_extra_view_a_line_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    answer = run("show", "1f1b", "-p", 2, "-m", 2, "-o", "x.png")
    assert answer.code == 2
    assert answer.err == (
        "penstock: PNG pictures are drawn by Pillow, which is not installed: "
        "pip install 'penstock[view]' (SVG pictures need nothing)\n"
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
    answer = in_a_process_of_python(code, tmp_path)
    assert answer == (
        "MissingExtraError the runtime needs torch, which is not installed: pip install 'penstock[torch]'\n"
    )


def in_a_process_of_python(code: str, cwd: Path) -> str:
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
    answer = in_a_process_of_python(code, tmp_path)
    assert "makespan" in answer
    assert "not installed, and so not used: " in answer
    assert "pip install 'penstock[search]'" in answer


def test_the_core_and_its_words_need_no_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
sys.argv = ["penstock", "show", "1f1b", "-p", "2", "-m", "2"]
from penstock.cli import main
main()
"""
    assert "rank 1" in in_a_process_of_python(code, tmp_path)
