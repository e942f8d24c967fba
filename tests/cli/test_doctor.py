"""Tests of `penstock doctor`: one line per check, with what to try, and it always ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import penstock
from penstock.diagnostics import Check
from tests.support.command_line import Run

CORE = ["python", "penstock", "numpy", "cores", "memory", "clock", "ports", "port 29500"]
NAMES = ["host name", "loopback name"]
EXTRAS = ["extra torch", "extra view", "extra search", "extra serve"]
TORCH = ["torch", "gloo", "gpu", "exchange", "internals"]


@pytest.mark.full
def test_a_machine_that_runs_these_tests_passes(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.code == 0
    assert result.json["verdict"] in ("ok", "warn")
    found = {check["name"]: check for check in result.json["checks"]}
    assert list(found) == CORE + NAMES + EXTRAS + TORCH
    assert found["penstock"]["message"] == penstock.__version__
    assert found["torch"]["verdict"] == "ok"
    assert found["exchange"]["message"].startswith("two processes connected and exchanged a tensor in ")


def test_without_torch_it_works_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("doctor")
    lines = result.out.splitlines()
    assert result.code == 0
    assert len(lines) == len(CORE + NAMES + EXTRAS)
    install = "pip install 'penstock[torch]', or in a clone: pip install -e '.[torch]'"
    assert f"warn  extra torch    torch not installed; for training: {install}" in lines


def test_every_line_has_a_verdict_and_a_failure_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Check("torch", "ok", "2.13.0"), Check("exchange", "fail", "no way")]
    monkeypatch.setattr("penstock.cli.doctor.torch_checks", lambda: given)
    result = run("doctor")
    assert result.code == 1
    assert {line.split()[0] for line in result.out.splitlines()} <= {"ok", "warn", "fail"}
    assert result.out.endswith("fail  exchange       no way\n")
    assert run("doctor", "--json").json["verdict"] == "fail"


def test_it_uses_no_colour_under_no_color(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in run("doctor").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run("doctor").out


def test_the_page_shows_a_line_for_each_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    block = page.split("```")[1].removeprefix("output\n")
    assert [line[6:21].strip() for line in block.splitlines()] == CORE + NAMES + EXTRAS + TORCH
