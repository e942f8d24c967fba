"""Tests that the examples run as documented and print what is in `examples/output`.

Each file there has commands after `$ ` and their output. Losses may differ by 0.02, because processors sum in
different orders. `python -m tests.test_examples` regenerates the files, and the pages that show them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.command_line import EXECUTABLE
from tests.support.grids import small

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
OUTPUTS = sorted((EXAMPLES / "output").glob("*.txt"))
NOT_RUN = {
    "torchrun --nproc-per-node 4 examples/composed.py pp=2 tp=2",
    "torchrun --nproc-per-node 8 examples/composed.py pp=2 fsdp=2 tp=2",
}
"""Larger meshes of the same example, which take minutes; tests/runtime/data_parallel covers them."""

ENVIRONMENT = {
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
NUMBER = re.compile(r"\d+\.\d+")
MEASURED = re.compile(r"(memory|tps) [\d.,]+")
"""Values that differ between runs."""


def parts_of(output: Path) -> list[tuple[str, str]]:
    """The commands of a file with their outputs."""
    text = output.read_text(encoding="utf-8")
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)


PRINTED = {command: printed for output in OUTPUTS for command, printed in parts_of(output)}
"""The outputs of the examples by command; test_docs.py uses them too."""
COMMANDS = {*PRINTED, *NOT_RUN}


def run(command: str, folder: Path) -> str:
    """The output of a command, run in a directory that has our examples."""
    program, *arguments = shlex.split(command)
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "python": [sys.executable],
        "penstock": [str(EXECUTABLE)],
    }
    answer = subprocess.run(  # noqa: S603 -- our own examples
        [*programs[program], *arguments],
        capture_output=True,
        check=False,
        cwd=folder,
        encoding="utf-8",
        env=os.environ | ENVIRONMENT,
        timeout=900,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def link_examples(folder: Path) -> Path:
    (folder / "examples").symlink_to(EXAMPLES)
    return folder


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.stem)
@small(lambda output: output.stem in {"custom_schedule", "plan_run"})
def test_an_example_prints_what_is_committed(output: Path, tmp_path: Path) -> None:
    link_examples(tmp_path)
    for command, committed in parts_of(output):
        printed, expected = (MEASURED.sub(r"\1 #", text) for text in (run(command, tmp_path), committed))
        if command.startswith("torchrun"):
            assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
            numbers = [float(number) for number in NUMBER.findall(expected)]
            assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(numbers, abs=0.02)
        else:
            assert printed == expected


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda example: example.name)
def test_every_example_documents_its_command_and_is_run(example: Path) -> None:
    doc = example.read_text(encoding="utf-8").split('"""')[1]
    lines = [line for line in doc.splitlines() if line.startswith(("torchrun ", "python "))]
    assert lines
    assert set(lines) <= COMMANDS
    assert set(lines) - NOT_RUN


def test_composed_has_the_same_losses_with_dp_and_fsdp() -> None:
    composed = "torchrun --nproc-per-node 4 examples/composed.py pp=2 {}=2"
    copied, sharded = (PRINTED[composed.format(how)] for how in ("dp", "fsdp"))
    assert copied == sharded


def test_migrating_changes_one_import_and_no_number() -> None:
    before, after = (
        (EXAMPLES / f"migrate_{when}.py").read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
        for when in ("before", "after")
    )
    torch_line = "from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B"
    our_line = "from penstock.pipelining import PipelineStage, ScheduleInterleaved1F1B"
    assert [line.replace(torch_line, our_line) for line in before if line] == [line for line in after if line]
    script = "torchrun --nproc-per-node 2 examples/migrate_{}.py"
    assert PRINTED[script.format("before")] == PRINTED[script.format("after")]


def test_the_python_and_the_csv_of_the_custom_schedule_are_about_twenty_lines_or_less() -> None:
    text = (EXAMPLES / "custom_schedule.py").read_text(encoding="utf-8")
    family = text[text.index("@penstock.register") : text.index("def main")]
    assert len(family.strip().splitlines()) <= 20
    assert len((EXAMPLES / "custom_schedule.csv").read_text(encoding="utf-8").splitlines()) <= 20


def rewrite() -> None:
    """Run all commands and write their outputs to the files and the pages that show them."""
    for output in OUTPUTS:
        with tempfile.TemporaryDirectory() as folder:
            link_examples(Path(folder))
            new = {command: run(command, Path(folder)) for command, _ in parts_of(output)}
        whole = "".join(f"$ {command}\n{printed}" for command, printed in new.items())
        output.write_text(whole, encoding="utf-8")
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
            text = page.read_text(encoding="utf-8")
            for command, printed in new.items():
                block = f"```console\n$ {command}\n"
                begin, found, rest = text.partition(block)
                text = begin + found + printed + rest[rest.index("```") :] if found else text
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()
