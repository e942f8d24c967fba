"""An uncaught failure is printed once, and the rank that failed is the first to exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock import PipelineError, StepFailedError
from penstock.runtime.failure import uncaught
from penstock.runtime.failure.events import Ended
from penstock.runtime.failure.process_names import local_pid, process_name

REPORT = (
    "step 3 failed on rank 1, stage 1, in 1F2\n  ValueError: broken\n  traceback on rank 1:\n    Traceback ..."
)


def failure() -> StepFailedError:
    error = StepFailedError(REPORT, 1, "1F2", 1, 2, "exception", "Traceback ...", 1, reporter=1)
    error.__cause__ = ValueError("broken")
    return error


def watch(*ended: int) -> Any:
    """Of a job whose ranks were processes that do not exist any more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    name = process_name().replace(str(os.getpid()), str(gone.pid))
    return SimpleNamespace(ended={rank: Ended(rank, name, "it has exited") for rank in ended})


def printed(
    error: StepFailedError, rank: int, watched: Any, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> str:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    uncaught.report_uncaught(error, None, watched)
    return str(capture.readouterr().err)


def test_the_rank_that_reports_prints_the_report_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    out = printed(failure(), 1, watch(), monkeypatch, capsys)
    assert out == "".join(f"[rank1]: {line}\n" for line in REPORT.splitlines())


def test_every_other_rank_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(failure(), 2, watch(1), monkeypatch, capsys)
    assert out == (
        "[rank2]: step 3 failed on rank 1, stage 1, in 1F2: ValueError: broken "
        "(the report is printed by world rank 1)\n"
    )


def test_every_other_rank_exits_after_the_one_that_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched, ended = watch(), watch(1).ended
    began = time.monotonic()
    threading.Timer(0.4, lambda: watched.ended.update(ended)).start()
    printed(failure(), 0, watched, monkeypatch, capsys)
    assert time.monotonic() - began >= 0.4


def test_it_waits_for_a_process_of_this_machine_that_says_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught, "_EXIT_SECONDS", 0.3)
    running = SimpleNamespace(ended={1: Ended(1, process_name(), "it has exited")})
    began = time.monotonic()
    uncaught._wait_for_exit(running, 1)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.3
    assert local_pid(process_name()) == os.getpid()
    assert local_pid("pid 1 on another-machine") is None


def test_the_original_error_is_given_to_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    printed(failure(), 1, watch(), monkeypatch, capsys)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: broken"


def test_other_errors_of_penstock_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    uncaught.install(watch)
    with pytest.raises(PipelineError) as caught:
        raise PipelineError("the ranks do not agree:\n  schedule: ...")
    sys.excepthook(PipelineError, caught.value, caught.tb)
    message, schedule, place = capsys.readouterr().err.splitlines()
    assert (message, schedule) == (
        "[rank2]: PipelineError: the ranks do not agree:",
        "[rank2]:   schedule: ...",
    )
    assert place.startswith(f"[rank2]:   called at {__file__}, line ")


def test_other_errors_are_printed_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    uncaught.install(watch)
    sys.excepthook(ValueError, ValueError("other"), None)
    assert "ValueError: other" in capsys.readouterr().err


PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from penstock.runtime import Pipeline
dist.init_process_group("gloo")

class Stage(nn.Linear):
    def forward(self, x):
        if dist.get_rank() == 1:
            raise ValueError("the data is broken")
        return super().forward(x)

pipeline = Pipeline([Stage(4, 4)], "1f1b", microbatches=4, loss=nn.functional.mse_loss)
pipeline.step(torch.randn(8, 4), target=torch.randn(8, 4))
"""


@pytest.mark.full
def test_torchrun_names_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "train.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert done.returncode != 0
    assert done.stderr.count("[rank1]:     Traceback (most recent call last):") == 1
    for rank in (0, 2):
        assert sum(line.startswith(f"[rank{rank}]:") for line in done.stderr.splitlines()) <= 1
    summary = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "ValueError: the data is broken" in summary
