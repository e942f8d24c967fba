"""An uncaught failure is printed once, and the rank that failed is the first to exit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import penstock
from penstock import PipelineError, StepFailedError
from penstock.errors import FailureKind
from penstock.processes import local_pid, process_name
from penstock.runtime import config as setup
from penstock.runtime.failure import report
from penstock.runtime.failure.links import Ended

REPORT = (
    "step 3 failed on rank 1, stage 1, in 1F2\n  ValueError: broken\n  traceback on rank 1:\n    Traceback ..."
)


def failure() -> StepFailedError:
    error = StepFailedError(REPORT, 1, "1F2", 1, 2, FailureKind.EXCEPTION, "Traceback ...", 1, reporter=1)
    error.__cause__ = ValueError("broken")
    return error


def detector(*ended: int) -> Any:
    """Of a job whose ranks were processes that do not exist any more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    name = process_name().replace(str(os.getpid()), str(gone.pid))
    return SimpleNamespace(ended={rank: Ended(rank, name, "it has exited") for rank in ended})


def printed(
    error: StepFailedError, rank: int, watched: Any, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> str:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    report.report_uncaught(error, None, watched)
    return str(capture.readouterr().err)


def test_the_rank_that_reports_prints_the_report_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    out = printed(failure(), 1, detector(), monkeypatch, capsys)
    assert out == "".join(f"[rank1]: {line}\n" for line in REPORT.splitlines())


def test_every_other_rank_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(failure(), 2, detector(1), monkeypatch, capsys)
    assert out == (
        "[rank2]: step 3 failed on rank 1, stage 1, in 1F2: ValueError: broken "
        "(the report is printed by world rank 1)\n"
    )


def test_every_other_rank_exits_after_the_one_that_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched, ended = detector(), detector(1).ended
    began = time.monotonic()
    threading.Timer(0.4, lambda: watched.ended.update(ended)).start()
    printed(failure(), 0, watched, monkeypatch, capsys)
    assert time.monotonic() - began >= 0.4


def test_it_waits_for_a_process_of_this_machine_that_says_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_EXIT_SECONDS", 0.3)
    running = SimpleNamespace(ended={1: Ended(1, process_name(), "it has exited")})
    began = time.monotonic()
    report._wait_for_exit(running, 1)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.3
    assert local_pid(process_name()) == os.getpid()
    assert local_pid("pid 1 on another-machine") is None


def test_the_original_error_is_given_to_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    printed(failure(), 1, detector(), monkeypatch, capsys)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: broken"


def test_other_errors_of_penstock_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report.install(detector)
    with pytest.raises(PipelineError) as caught:
        raise PipelineError("the ranks do not agree:\n  schedule: ...")
    sys.excepthook(PipelineError, caught.value, caught.tb)
    message, schedule, place = capsys.readouterr().err.splitlines()
    assert (message, schedule) == (
        "[rank2]: PipelineError: the ranks do not agree:",
        "[rank2]:   schedule: ...",
    )
    assert place.startswith(f"[rank2]:   called at {__file__}, line ")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installed in a process of torchrun that has no process group yet; calls it with an error of Penstock."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report.install(detector)

    def fail() -> None:
        with pytest.raises(PipelineError) as caught:
            setup.check_options(-7, None, average=True)
        sys.excepthook(PipelineError, caught.value, caught.tb)

    return fail


def test_an_error_before_the_first_connection_has_a_message_and_the_users_line(
    hook: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    hook()
    message, place = capsys.readouterr().err.splitlines()
    assert message == "[rank3]: PipelineError: timeout= must be a finite number of seconds above 0 (given -7)"
    assert place.startswith(f"[rank3]:   called at {__file__}, line ")


def test_the_rank_is_printed_once_if_torchs_hook_adds_it_too(
    hook: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", collected := io.StringIO())
    hook()
    assert collected.getvalue().startswith("PipelineError: ")
    assert "[rank3]" not in collected.getvalue()


def test_a_process_that_is_no_rank_prints_the_traceback(
    hook: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK")
    hook()
    assert "Traceback (most recent call last):" in capsys.readouterr().err


def test_torchruns_summary_gets_the_users_frames_only(
    hook: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    hook()
    stack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert __file__ in stack
    assert str(Path(penstock.__file__).parent) not in stack


def test_other_errors_are_printed_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report.install(detector)
    sys.excepthook(ValueError, ValueError("other"), None)
    assert "ValueError: other" in capsys.readouterr().err


def torchrun(program: str, processes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program, `train.py` in the folder, in so many processes."""
    (folder / "train.py").write_text(program)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(  # noqa: S603 -- our own program
        [sys.executable, *launch, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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


WRONG_RANKS = """
import torch.distributed as dist
from torch import nn
import penstock
from penstock.runtime import Pipeline
dist.init_process_group("gloo")
schedule = penstock.build("1f1b", ranks=4, microbatches=4)
Pipeline([nn.Linear(4, 4)], schedule, loss=nn.functional.mse_loss)
"""


@pytest.mark.full
def test_under_torchrun_a_wrong_pipeline_is_two_lines_per_rank(tmp_path: Path) -> None:
    done = torchrun(WRONG_RANKS, 2, tmp_path)
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    for rank in {line[5] for line in own}:  # torchrun may end one before it prints
        assert [line for line in own if line[5] == rank] == [
            f"[rank{rank}]: PipelineError: the schedule 1f1b is for 4 ranks, but the process group has 2",
            f"[rank{rank}]:   called at {tmp_path}/train.py, line 8",
        ]
    assert own
    summary = done.stderr.partition("Root Cause")[2]
    assert "PipelineError: the schedule 1f1b is for 4 ranks" in summary
    assert "penstock/runtime" not in done.stderr


@pytest.mark.full
def test_torchrun_names_the_rank_that_failed(tmp_path: Path) -> None:
    done = torchrun(PROGRAM, 3, tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("[rank1]:     Traceback (most recent call last):") == 1
    for rank in (0, 2):
        assert sum(line.startswith(f"[rank{rank}]:") for line in done.stderr.splitlines()) <= 1
    summary = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "ValueError: the data is broken" in summary
