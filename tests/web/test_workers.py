"""Promise: a worker that ends without an answer is called out of memory only if its end says so."""

from __future__ import annotations

import signal

import pytest

from penstock.web.workers import exit_reply


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV])
def test_signals_of_processes_without_memory(code: int) -> None:
    assert exit_reply(code).kind == "memory"


@pytest.mark.parametrize(("code", "told"), [(1, "exit code 1"), (-15, "signal 15"), (None, "exit code None")])
def test_other_ends_are_faults_of_the_server(code: int | None, told: str) -> None:
    reply = exit_reply(code)
    assert reply.kind == "failure"
    assert told in reply.text
