"""Promise: what the README and the docs show is what happens.

Python blocks run, those of a page one after the other in one namespace; a `text` block after one is what it
prints. Console blocks are a command and its output. Lines of `sh` blocks run if they are ours, and files that
they write are the files that are there; others are known to be run elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import penstock
from penstock.cli import app, main
from penstock.families import registry
from tests.cli.test_manners import SLOW
from tests.test_examples import COMMANDS, PRINTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS: dict[str, Any] = vars(get_command(app))["commands"]
FILES = {".csv", ".json", ".toml"}
FOR_READERS = {"", "diff", "error", "output"}
"""Pictures, changes, what differs between machines, and messages, which have test_troubleshooting.py."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Shell:
    """Runs `penstock` in this process, in an empty folder that has our examples, as on a terminal."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "docs" / "families").mkdir(parents=True)
        patch.chdir(folder)
        patch.setenv("NO_COLOR", "1")

    def run(self, command: str, columns: int = 80) -> str:
        """What it prints; a schedule that is shown to be bad is no fault."""
        program, *words = shlex.split(command, comments=True)
        assert program == "penstock"
        self.patch.setenv("COLUMNS", str(columns))
        self.patch.setattr(sys, "argv", ["penstock", *words])
        self.capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capture.readouterr()
        assert (err, ended.value.code in {0, None, 1}) == ("", True), command
        return out


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_blocks_do_what_they_say(page: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_BY_KEY", dict(registry._BY_KEY))
    namespace: dict[str, object] = {"__name__": page.stem}
    printed = ""
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, page.name, "exec"), namespace)  # noqa: S102 -- our own docs
            printed = out.getvalue()
        elif language == "text":
            assert printed == body
        elif language == "console":
            check_console(body, shell)
        elif language == "sh":
            for line in filter(None, body.splitlines()):
                check_line(line.partition("  #")[0].strip(), shell)
        else:
            check_file(language, body)


def check_console(body: str, shell: Shell) -> None:
    """A command and what it prints; what examples print is tested with them."""
    command, _, expected = body.removeprefix("$ ").partition("\n")
    if command in PRINTED:
        assert PRINTED[command] == expected
    else:
        wide = max(map(len, body.split("\n"))) > 80
        assert shell.run(command, 104 if wide else 80) == expected


def check_line(line: str, shell: Shell) -> None:
    """A line somebody may type: it runs, or something else runs it, or at least it names what there is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if line.startswith("penstock "):
        check_command(line, shell)
    elif line.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(line.split()[1:]) <= set(targets)
    elif line.startswith("pip install "):
        extras = re.findall(r"\[(.*)\]", line)
        assert set(",".join(extras).split(",")) - {""} <= set(project["optional-dependencies"])
    elif line.startswith("python -m "):
        assert (ROOT / line.split()[2].replace(".", "/")).with_suffix(".py").exists()
    else:
        assert line in COMMANDS, line


def check_command(line: str, shell: Shell) -> None:
    """A command of ours can be typed so; and it runs, unless that takes long or needs a reader's own files."""
    _, word, *words = shlex.split(line)
    context = WORDS[word].make_context(word, list(words))
    made = context.params.get("output")
    given = [name for name in words if Path(name).suffix in FILES and name != str(made)]
    if word not in SLOW and all((shell.folder / name).exists() for name in given):
        shell.run(line)
        if str(made).startswith("docs/"):
            assert (shell.folder / made).read_bytes() == (ROOT / made).read_bytes(), line


def check_file(language: str, body: str) -> None:
    """The text of a file, which can at least be read."""
    if language == "toml":
        assert tomllib.loads(body)
    elif language == "json":
        assert json.loads(body)
    elif language == "csv":
        assert penstock.Schedule.parse(body.replace(",", " "))
    else:
        assert language in FOR_READERS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_picture_of_the_readme_is_what_its_command_draws(shell: Shell) -> None:
    shell.run("penstock show zbv -p 4 -m 8 --lowered -o zbv.svg")
    assert (shell.folder / "zbv.svg").read_bytes() == (DOCS / "zbv.svg").read_bytes()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_of_the_command_line_has_a_page_with_all_its_options(word: str) -> None:
    text = (DOCS / f"{word}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {word}: ")
    for option in WORDS[word].params:
        names = "|".join(re.escape(name) for name in option.opts if name.startswith("-"))
        assert re.search(rf"(?<![\w-])({names})\b", text), option.opts


def test_idle_shares_in_advice_are_those_that_the_commands_print() -> None:
    decide = (DOCS / "decide.md").read_text(encoding="utf-8")
    printed = "".join(body for language, body in BLOCK.findall(decide) if language == "console")
    advice = [decide, *(page.read_text(encoding="utf-8") for page in (DOCS / "families").glob("*.md"))]
    shares = re.findall(r"(\d+\.\d) %", "\n".join(advice))
    assert len(shares) > 20
    assert all(f" {share}%" in printed for share in shares)


def test_tests_that_are_named_are_there() -> None:
    there = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in there, (page, name)
        for path in re.findall(r"`((?:tests|benchmarks|examples|src)/[\w./]+)`", text):
            assert (ROOT / path).exists(), (page, path)
