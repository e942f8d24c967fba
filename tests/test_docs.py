"""Tests that the code, commands and outputs in the README and the docs are correct.

The Python blocks of a page run one after the other in one namespace; a `text` block is the output of the block
before it. A console block is a command and its output. The lines of `sh` blocks run if they are `penstock`
commands, and the files they write must equal those in the repository; other lines are tested elsewhere.
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

import penstock
import penstock.runtime
from penstock.cli import SUMMARIES, load_command, main
from penstock.families import registry
from tests.support.command_line import SLOW_COMMANDS
from tests.support.grids import small
from tests.test_examples import COMMANDS, PRINTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLI_COMMANDS: dict[str, Any] = {name: load_command(name) for name in SUMMARIES}
FILES = {".csv", ".json", ".toml"}
FOR_READERS = {"", "diff", "error", "output"}
"""Pictures, diffs, machine-dependent output, and messages, which test_troubleshooting.py tests."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Shell:
    """Runs `penstock` in this process, in a temporary directory that has our examples."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "docs" / "families").mkdir(parents=True)
        patch.chdir(folder)
        patch.setenv("NO_COLOR", "1")

    def run(self, command: str, columns: int = 80) -> str:
        """The output of a command; an invalid schedule (exit code 1) is not an error."""
        out, err, code = self._run(command, columns)
        assert (err, code in {0, None, 1}) == ("", True), command
        return out

    def error(self, command: str) -> str:
        """The message of a command that is refused."""
        out, err, code = self._run(command, 80)
        assert (out, code) == ("", 2), command
        return err

    def _run(self, command: str, columns: int) -> tuple[str, str, object]:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "penstock"
        self.patch.setenv("COLUMNS", str(columns))
        self.patch.setattr(sys, "argv", ["penstock", *arguments])
        self.capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return *self.capture.readouterr(), ended.value.code


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@small(lambda page: page.stem not in {"memory", "plan", "plan_costs"})
def test_code_blocks_run_and_print_what_they_show(
    page: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """A command and its output, or its error; the output of examples is tested in test_examples.py."""
    command, _, expected = body.removeprefix("$ ").partition("\n")
    if command in PRINTED:
        assert PRINTED[command] == expected
    elif expected.startswith("penstock: "):
        assert shell.error(command).split() == expected.split()  # pages wrap long lines
    else:
        wide = max(map(len, body.split("\n"))) > 80
        assert shell.run(command, 104 if wide else 80) == expected


def check_line(line: str, shell: Shell) -> None:
    """A shell line: it runs, or another test runs it, or at least what it names exists."""
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
    """A `penstock` command parses; and it runs, unless it is slow or needs files of the reader."""
    _, command, *arguments = shlex.split(line)
    context = CLI_COMMANDS[command].make_context(command, list(arguments))
    output = context.params.get("output")
    inputs = [name for name in arguments if Path(name).suffix in FILES and name != str(output)]
    if command not in SLOW_COMMANDS and all((shell.folder / name).exists() for name in inputs):
        shell.run(line)
        if str(output).startswith("docs/"):
            assert (shell.folder / output).read_bytes() == (ROOT / output).read_bytes(), line


def check_file(language: str, body: str) -> None:
    """The text of a file, which must parse."""
    if language == "toml":
        assert tomllib.loads(body)
    elif language == "json":
        assert json.loads(body)
    elif language == "csv":
        assert penstock.Schedule.parse(body.replace(",", " "))
    else:
        assert language in FOR_READERS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_picture_of_the_readme_is_what_its_command_draws(shell: Shell) -> None:
    command = "penstock compare 1f1b zb-h1 zbv -p 4 -m 8 -o docs/bubbles.svg"
    assert f"(`{command}`)" in (ROOT / "README.md").read_text(encoding="utf-8")
    shell.run(command)
    assert (shell.folder / "docs" / "bubbles.svg").read_bytes() == (DOCS / "bubbles.svg").read_bytes()


@pytest.mark.parametrize("command", CLI_COMMANDS)
def test_every_command_has_a_page_with_all_its_options(command: str) -> None:
    text = (DOCS / f"{command}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {command}: ")
    for option in CLI_COMMANDS[command].params:
        names = "|".join(re.escape(name) for name in option.opts if name.startswith("-"))
        assert re.search(rf"(?<![\w-])({names})\b", text), option.opts


def test_idle_shares_in_advice_are_in_the_output_of_commands() -> None:
    decide = (DOCS / "decide.md").read_text(encoding="utf-8")
    printed = "".join(body for language, body in BLOCK.findall(decide) if language == "console")
    advice = [decide, *(page.read_text(encoding="utf-8") for page in (DOCS / "families").glob("*.md"))]
    shares = re.findall(r"(\d+\.\d) %", "\n".join(advice))
    assert len(shares) > 20
    assert all(f" {share}%" in printed for share in shares)


def test_tests_and_paths_that_pages_name_exist() -> None:
    there = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in there, (page, name)
        for path in re.findall(r"`((?:tests|benchmarks|examples|src)/[\w./]+)`", text):
            assert (ROOT / path).exists(), (page, path)


def test_the_api_reference_has_every_public_name() -> None:
    directives = re.findall(
        r"^::: (penstock[\w.]*)$", "".join(map(Path.read_text, DOCS.glob("api/*.md"))), re.MULTILINE
    )
    named = [directive.rpartition(".")[2] for directive in directives]
    assert len(named) == len(set(named))
    assert {*penstock.__all__, *penstock.runtime.__all__} <= set(named)
