"""Promise: what the README and the docs show is what happens.

Python blocks run, those of a file one after the other in one namespace; a `text` block after one is what it
prints. Console blocks are commands and their output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.families import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_do_what_they_say(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_BY_KEY", dict(registry._BY_KEY))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, object] = {}
    printed = ""
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, page.name, "exec"), namespace)  # noqa: S102 -- our own docs
            printed = out.getvalue()
        elif language == "text":
            assert printed == body
        elif language == "console":
            command, _, expected = body.partition("\n")
            assert run(command.removeprefix("$ "), max(map(len, body.split("\n")))) == expected


def run(command: str, width: int) -> str:
    """What a command prints on a terminal just wide enough for the block, or of 80 characters."""
    program, *arguments = shlex.split(command)
    assert program == "penstock"
    environment = os.environ | {"COLUMNS": "80" if width <= 80 else "104", "NO_COLOR": "1"}
    answer = subprocess.run(  # noqa: S603 -- our own docs
        [sys.executable, "-c", "from penstock.cli import main; main()", *arguments],
        capture_output=True,
        check=False,
        encoding="utf-8",
        env=environment,
    )
    assert answer.stderr == ""
    return answer.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path: Path) -> None:
    run(f"penstock show zbv -p 4 -m 8 --lowered -o {tmp_path / 'zbv.svg'}", 80)
    assert (tmp_path / "zbv.svg").read_bytes() == (ROOT / "docs" / "zbv.svg").read_bytes()
