"""Promise: a rank writes its state on a signal while it is blocked, after a failure, if it cannot connect."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from penstock import build
from penstock.errors import PenstockError, PipelineError
from penstock.runtime import Pipeline, record_state
from penstock.traces.diagnose.diagnosis import diagnose, read_evidence
from tests.support.pool import Pools

SCHEDULE = build("1f1b", ranks=2, microbatches=2)
BATCH = torch.ones(2, 4)


class Held(nn.Module):
    """A layer whose forward on rank 1 waits until both ranks have written their states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner, self.folder = nn.Linear(4, 4), folder

    def forward(self, x: Tensor) -> Tensor:
        end = time.monotonic() + 120
        while dist.get_rank() == 1 and time.monotonic() < end and not (self.folder / "go").exists():
            time.sleep(0.05)
        output: Tensor = self.inner(x)
        return output


def ask_until_blocked(folder: Path) -> None:
    """Send the signal to this process until its state says that it waits, and the other rank has written."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        states = {path.name: path.read_text() for path in folder.glob("rank*.json")}
        if '"awaits": "0RECV_B0"' in states.get("rank0.json", "") and "1F0" in states.get("rank1.json", ""):
            break
    (folder / "go").touch()


def signalled(folder: str) -> float | None:
    torch.manual_seed(0)
    pipeline = Pipeline([Held(Path(folder))], SCHEDULE, loss=mse_loss, state_dir=folder)
    if dist.get_rank() == 0:
        threading.Thread(target=ask_until_blocked, args=(Path(folder),), daemon=True).start()
    return pipeline.step(BATCH, target=BATCH).loss


def test_a_signal_to_one_blocked_rank_writes_the_states_of_all_and_harms_nothing(
    pools: Pools, tmp_path: Path
) -> None:
    losses = pools(2).run(signalled, str(tmp_path))
    assert losses[0] == losses[1] is not None
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    found = diagnose(pipeline, SCHEDULE)
    assert found.states[0].awaits == "0RECV_B0"
    assert found.states[0].reason == "signal"
    assert found.states[1].reason in ("signal on world rank 0", "signal")
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("computing", (1,))
    assert "its main thread is in forward (" in found.culprit.message


def write_own_state(folder: str) -> None:
    """Write this rank's state, and wait for a file of now: ranks of an earlier test may ask for one too."""
    path, end = Path(folder) / f"rank{dist.get_rank()}.json", time.monotonic() + 120
    dist.barrier()
    asked = time.time()
    os.kill(os.getpid(), signal.SIGUSR1)
    while time.monotonic() < end:
        if path.exists() and json.loads(path.read_text())["written_at"] > asked:
            break
        time.sleep(0.05)
    dist.barrier()


def evaluated(folder: str) -> None:
    """Two steps and three evals, then the state of this rank is asked for."""
    pipeline = Pipeline([nn.Linear(4, 4)], SCHEDULE, loss=mse_loss, state_dir=folder)
    for _ in range(2):
        pipeline.step(BATCH, target=BATCH)
        pipeline.eval(BATCH, target=BATCH)
    pipeline.eval(BATCH, target=BATCH)
    write_own_state(folder)


def evaluated_by_torch(folder: str) -> None:
    """The same on torch's runtime."""
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=mse_loss)
    record_state(schedule, folder)
    args: Any = (BATCH,) if rank == 0 else ()
    kwargs: Any = {"target": BATCH, "losses": []} if rank else {}
    for call in (schedule.step, schedule.eval, schedule.step, schedule.eval, schedule.eval):
        call(*args, **kwargs)
    write_own_state(folder)


@pytest.mark.parametrize("run", [evaluated, evaluated_by_torch])
def test_evals_are_no_steps_of_a_state(pools: Pools, tmp_path: Path, run: Callable[[str], None]) -> None:
    pools(2).run(run, str(tmp_path))
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    for state in diagnose(pipeline, SCHEDULE).states.values():
        assert (state.mode, state.step_number, state.call_number) == ("outside", 2, 5)


def refused(folder: str) -> str:
    family = "gpipe" if dist.get_rank() else "1f1b"
    schedule = build(family, ranks=2, microbatches=4)
    try:
        Pipeline([nn.Linear(4, 4)], schedule, loss=mse_loss, state_dir=folder)
    except PenstockError as error:
        return str(error)
    return ""


def test_the_states_of_a_run_that_was_refused_name_the_rank_with_another_schedule(
    pools: Pools, tmp_path: Path
) -> None:
    assert all("do not agree" in answer for answer in pools(2).run(refused, str(tmp_path)))
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    found = diagnose(pipeline, build("1f1b", ranks=2, microbatches=4))
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("another-schedule", (1,))
    assert {state.mode for state in found.states.values()} == {"connecting"}
    assert "do not agree" in found.states[0].error
    (note,) = diagnose(pipeline).notes
    assert str(note) == "the ranks run different schedules: give the schedule of this run as schedule"


class Raising(nn.Linear):
    """Fails on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("too large")
        return super().forward(x)


def raised(folder: str) -> str:
    pipeline = Pipeline([Raising(4, 4)], SCHEDULE, loss=mse_loss, state_dir=folder)
    try:
        pipeline.step(BATCH, target=BATCH)
    except PenstockError as error:
        return str(error)
    return ""


def test_a_rank_that_raised_is_the_culprit(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(raised, str(tmp_path))
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    found = diagnose(pipeline)
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("exception", (1,))
    assert "in 1F0: ArithmeticError: too large" in found.culprit.message
    assert found.states[0].error
    assert not found.states[0].is_origin


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match=r"state_dir= .*file is not a folder"):
        Pipeline([nn.Linear(4, 4)], "1f1b", microbatches=2, state_dir=tmp_path / "file")
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(PipelineError, match=r"PENSTOCK_STATE_DIR .*file is not a folder"):
        record_state(object())


def test_only_schedules_of_torch_are_recorded(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"record_state\(\) knows torch's 1F1B, GPipe and .*, not object"):
        record_state(object(), tmp_path)
