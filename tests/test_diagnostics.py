"""Tests of the checks of `penstock doctor`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import diagnostics
from penstock.diagnostics import Check
from penstock.runtime import doctor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# --- torch, in processes of its own ----------------------------------------------------------------


def replace_processes(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run other code in place of the two processes."""
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", code, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


def test_processes_that_hang_are_killed_and_their_output_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_processes(
        monkeypatch,
        """
import time
print('{"name": "torch", "verdict": "ok", "message": "x"}', flush=True)
time.sleep(60)
""",
    )
    begin = time.monotonic()
    known, missed = diagnostics.torch_checks(seconds=2)
    assert time.monotonic() - begin < 20
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
    replace_processes(monkeypatch, code)
    (check,) = diagnostics.torch_checks(seconds=20)
    assert check.verdict == "fail"
    assert check.message.startswith(f"two processes could not exchange a tensor: {says}")


@pytest.mark.parametrize(
    ("version", "verdict", "says"),
    [
        ("2.13.1+cu130", "ok", "tested with 2.13, 2.14, 2.15"),
        ("2.15.0", "ok", "tested with 2.13, 2.14, 2.15"),
        ("2.16.0", "warn", "private names may have changed: see internals"),
        ("2.4.1", "fail", "older than 2.13: pip install 'penstock[torch]'"),
    ],
)
def test_versions_of_torch_are_distinguished(version: str, verdict: str, says: str) -> None:
    check = doctor._version(version)
    assert (check.verdict, says in check.message) == (verdict, True)


# --- the machine -----------------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = diagnostics._torchrun_port(port)
    assert (check.name, check.verdict) == (f"port {port}", "warn")
    assert check.message.startswith("in use; it is torchrun's default: give --standalone")


def test_an_unknown_host_name_is_reported_with_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    check = diagnostics.name_checks()[0]
    assert check.verdict == "warn"
    assert check.message.startswith("'node7' cannot be resolved (Name or service not known): add it")
    assert "GLOO_SOCKET_IFNAME=lo" in check.message


def test_a_resolution_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> tuple[str, str]:
        time.sleep(1)
        return "late", "0"

    monkeypatch.setattr(diagnostics, "RESOLUTION_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getnameinfo", slow)
    check = diagnostics.name_checks()[1]
    assert check.verdict == "warn"
    assert check.message.startswith(
        "127.0.0.1 was not resolved within 0.1 s: add '127.0.0.1 localhost' to /etc/"
    )


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(diagnostics.EXTRAS) == set(project["project"]["optional-dependencies"]) - {"dev", "docs"}
