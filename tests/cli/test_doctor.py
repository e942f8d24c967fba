"""Promise: `penstock doctor` says in one line each what is well and what is not, with what to try, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import diagnostics
from penstock.diagnostics import Check
from penstock.runtime import torch_checks
from tests.cli.conftest import COLOUR, Run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORE = ["python", "penstock", "numpy", "cores", "memory", "clock", "ports", "port 29500"]
NAMES = ["host name", "loopback name"]
EXTRAS = ["extra torch", "extra view", "extra search"]
TORCH = ["torch", "gloo", "gpu", "exchange"]


@pytest.mark.xdist_group("ranks-2")
def test_a_machine_that_runs_these_tests_is_well(run: Run) -> None:
    answer = run("doctor", "--json")
    assert answer.code == 0
    assert answer.json["verdict"] in ("ok", "warn")
    found = {check["name"]: check for check in answer.json["checks"]}
    assert list(found) == CORE + NAMES + EXTRAS + TORCH
    assert found["penstock"]["message"] == penstock.__version__
    assert found["torch"]["verdict"] == "ok"
    assert found["exchange"]["message"].startswith("two processes met and exchanged a tensor in ")


def test_without_torch_it_works_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = run("doctor")
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert len(lines) == len(CORE + NAMES + EXTRAS)
    assert "warn  extra torch    torch not installed; to train: pip install 'penstock[torch]'" in lines


def test_every_line_has_a_verdict_and_a_failure_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Check("torch", "ok", "2.13.0"), Check("exchange", "fail", "no way")]
    monkeypatch.setattr(sys.modules["penstock.cli.doctor"], "torch_checks", lambda: given)
    answer = run("doctor")
    assert answer.code == 1
    assert {line.split()[0] for line in answer.out.splitlines()} <= {"ok", "warn", "fail"}
    assert answer.out.endswith("fail  exchange       no way\n")
    assert run("doctor", "--json").json["verdict"] == "fail"


def test_it_uses_no_colour_under_no_color(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from penstock.cli import main; main()"
    for asked, coloured in (({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False), ({"FORCE_COLOR": "1"}, True)):
        environment = {name: value for name, value in os.environ.items() if name not in COLOUR} | asked
        done = subprocess.run(  # noqa: S603 -- our own code
            [sys.executable, "-c", code, "doctor"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        assert (b"\x1b[32m" in done.stdout) == coloured


# --- torch, in processes of its own ----------------------------------------------------------------


def stands_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let other code run where the two processes would."""
    begin = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return begin([sys.executable, "-c", code, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


def test_processes_that_hang_are_ended_and_their_words_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_in(
        monkeypatch,
        """
import time
print('{"name": "torch", "verdict": "ok", "message": "x"}', flush=True)
time.sleep(60)
""",
    )
    begin = time.monotonic()
    known, missed = diagnostics.torch_checks(seconds=2)
    assert time.monotonic() - begin < 50
    assert known == Check("torch", "ok", "x")
    assert missed.verdict == "fail"
    assert "they did not end within 2 s" in missed.message
    assert "GLOO_SOCKET_IFNAME=lo" in missed.message


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise OSError('libtorch.so: not found')", "OSError: libtorch.so: not found"),
        ("import os; os.abort()", "it ended with code -6"),
    ],
)
def test_processes_that_crash_are_quoted(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, code)
    (check,) = diagnostics.torch_checks(seconds=300)
    assert check.verdict == "fail"
    assert check.message.startswith(f"two processes could not exchange a tensor: {says}")


@pytest.mark.parametrize(
    ("version", "verdict", "says"),
    [
        ("2.13.1+cu130", "ok", "tested with 2.13"),
        ("2.14.0", "warn", "fields of FSDP2 that may have changed"),
        ("2.4.1", "fail", "older than 2.13: pip install 'penstock[torch]'"),
    ],
)
def test_versions_of_torch_are_told_apart(version: str, verdict: str, says: str) -> None:
    check = torch_checks._version(version)
    assert (check.verdict, says in check.message) == (verdict, True)


# --- the machine -----------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = diagnostics._torchrun_port(port)
    assert (check.name, check.verdict) == (f"port {port}", "warn")
    assert check.message.startswith("taken; torchrun takes it unless told otherwise: give --standalone")


def test_a_host_name_that_nobody_knows_is_told_with_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    check = diagnostics.name_checks()[0]
    assert check.verdict == "warn"
    assert check.message.startswith("'node7' cannot be looked up (Name or service not known): add it")
    assert "GLOO_SOCKET_IFNAME=lo" in check.message


def test_a_lookup_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> tuple[str, str]:
        time.sleep(1)
        return "late", "0"

    monkeypatch.setattr(diagnostics, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getnameinfo", slow)
    check = diagnostics.name_checks()[1]
    assert check.verdict == "warn"
    assert check.message.startswith(
        "127.0.0.1 was not looked up within 0.1 s: have '127.0.0.1 localhost' in /etc/"
    )


def test_the_extras_it_knows_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(diagnostics.EXTRAS) == set(diagnostics.WHAT_FOR)
    assert set(diagnostics.EXTRAS) == set(project["project"]["optional-dependencies"]) - {"dev", "docs"}


def test_the_page_shows_a_line_for_each_thing_that_is_looked_at() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    block = page.split("```")[1].removeprefix("output\n")
    assert [line[6:21].strip() for line in block.splitlines()] == CORE + NAMES + EXTRAS + TORCH
