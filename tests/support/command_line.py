"""Run the `penstock` command: in this process, which is fast, or in its own, as a shell does."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import penstock
from penstock.lowering import DeferReceives
from tests.support.kineto_files import write_kineto_files
from tests.support.model_configs import CONFIGS

__all__ = [
    "COLOUR_VARIABLES",
    "EXECUTABLE",
    "MEGATRON_LOG",
    "SLOW_COMMANDS",
    "CommandResult",
    "Run",
    "run_process",
    "stderr_on_terminal",
    "write_example_files",
]

COLOUR_VARIABLES = ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS")
EXECUTABLE = Path(sysconfig.get_path("scripts")) / "penstock"
SLOW_COMMANDS = {"demo", "diagnose", "doctor", "plan", "play", "read-trace", "search", "verify-grads"}
"""Commands that start processes, take long or need the files of a run; each has its own tests."""


MEGATRON_LOG = """times across ranks (ms):
  forward-backward:
     rank  0: 170.00
     rank  1: 170.00
  forward-compute:
     rank  0: 40.00
     rank  1: 60.00
  backward-compute:
     rank  0: 80.00
     rank  1: 80.00
"""
"""What Megatron-LM logs for one step of 4 microbatches on 2 ranks."""


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The text on stderr without the boxes, line breaks and colours that typer adds."""
        return " ".join(re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]", " ", self.err).split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]


def run_process(
    *arguments: str,
    cwd: Path,
    stdout: int = subprocess.PIPE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> CommandResult:
    """Run the installed command; `environment` extends ours, from which the colour variables are removed."""
    ours = {name: value for name, value in os.environ.items() if name not in COLOUR_VARIABLES}
    done = subprocess.run(  # noqa: S603 -- our own command
        [EXECUTABLE, *arguments],
        cwd=cwd,
        env={**ours, "COLUMNS": "80", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    return CommandResult(done.returncode, done.stdout or "", done.stderr)


def stderr_on_terminal(*arguments: str, cwd: Path) -> bytes:
    """What a command that succeeds writes to stderr if that is a terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "penstock", *arguments]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=slave) as process:  # noqa: S603 -- our own
        os.close(slave)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while chunk := os.read(master, 1 << 16):
                shown += chunk
    os.close(master)
    assert process.returncode == 0
    return shown


def write_example_files(directory: Path) -> None:
    """Write the files that the examples in the help texts name."""
    small = penstock.build("1f1b", ranks=2, microbatches=4)
    for name in ("mine.csv", "mine.json", "other.csv"):
        small.write(directory / name)
    penstock.build("zbv", ranks=4, microbatches=8).write(directory / "zbv.csv")
    DeferReceives(past_sends=True)(penstock.lower(small)).write(directory / "deferred.csv")
    (directory / "costs.toml").write_text("forward_seconds = 2\nactivation_bytes = 1e6\n")
    write_kineto_files(directory, penstock.simulate(small, penstock.Costs(latency=0.01)))
    (directory / "megatron.log").write_text(MEGATRON_LOG)
    (directory / "config.json").write_text((CONFIGS / "llama-3-8b.json").read_text())
