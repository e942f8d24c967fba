"""Promise: a process that ends between steps is named by all others, whatever they call next."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import util as processes
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint, split
from penstock.runtime.failure import process_detector
from penstock.runtime.session import step_runner
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.grids import small
from tests.support.pool import Pool
from tests.support.slowness import slowness

CALLS = ["step", "eval", "clip_grad_norm_", "profile", "save_checkpoint", "load_checkpoint", "Pipeline"]


def new_pipeline() -> Pipeline:
    stages = split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), at=["1", "2", "3"])
    return Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=60)


def profiled(pipeline: Pipeline) -> None:
    with pipeline.profile():
        pass


def call(name: str, pipeline: Pipeline, path: Path) -> CallOutcome:
    x = torch.ones(8, 4)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: pipeline.step(x, target=x),
        "eval": lambda: pipeline.eval(x, target=x),
        "clip_grad_norm_": lambda: pipeline.clip_grad_norm_(1.0),
        "profile": lambda: profiled(pipeline),
        "save_checkpoint": lambda: save_checkpoint(path, pipeline),
        "load_checkpoint": lambda: load_checkpoint(path, pipeline),
        "Pipeline": new_pipeline,
    }
    return attempt(calls[name])


def end_process(how: str) -> None:
    """End this process: by a signal, with or without a child that lives on, at once, or as a script ends."""
    if how == "kill with a child" and os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    if how.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        processes._exit_function()  # type: ignore[attr-defined]
    os._exit(3)


def end_between_steps(victim: int, how: str, when: str, name: str, path: Path) -> list[CallOutcome]:
    dist.barrier()  # some processes start late
    with new_pipeline() as pipeline:
        call("step", pipeline, path)
        save_checkpoint(path, pipeline)
        dist.barrier()
        if dist.get_rank() == victim:
            time.sleep(0.5 if when == "during" else 0)
            end_process(how)
        time.sleep(0.5 if when == "before" else 0)
        return [call(name, pipeline, path), call("Pipeline", pipeline, path)]


ENDS = [(0, "kill"), (1, "_exit"), (2, "exit"), (3, "kill with a child")]
CASES = [
    (name, *ENDS[(place + 2 * late) % 4], "during" if late else "before")
    for place, name in enumerate(CALLS)
    for late in (False, True)
]
"""Every call meets two of the ways to end, one before it and one during it."""


@pytest.mark.parametrize(("name", "victim", "how", "when"), CASES)
@small(
    lambda name, when: (name, when) in {("step", "before"), ("eval", "during"), ("load_checkpoint", "during")}
)
def test_a_process_that_ends_between_steps_is_named(
    failing_pool: Pool, tmp_path: Path, name: str, victim: int, how: str, when: str
) -> None:
    path = tmp_path / "last"
    results = failing_pool.run(end_between_steps, victim, how, when, name, path, lost=(victim,))
    del results[victim]
    reason = "it has exited" if how == "exit" else "without a message: killed, or crashed"
    for outcomes in results:
        for outcome in outcomes:
            print_report(outcome.text)
            assert f"rank {victim} " in outcome.text
            assert "has ended" in outcome.text
            assert "its process (pid" in outcome.text
            assert reason in outcome.text
            assert outcome.seconds < SOON * slowness()
    if name in {"step", "eval"}:
        assert {outcomes[0].where for outcomes in results} == {(victim, None, None, None, "lost")}
        failed = "step 2" if name == "step" else "the eval after step 1"
        assert results[0][0].text.startswith(f"{failed} failed: rank {victim}")
        assert len({outcomes[0].text for outcomes in results}) == 1


def end_while_others_connect(victim: int) -> CallOutcome:
    """The victim ends when it has connected; the others wait for what it has not sent."""
    dist.barrier()  # some processes start late
    ends = mock.Mock(side_effect=lambda *_: os._exit(3))
    is_victim = dist.get_rank() == victim
    with mock.patch.object(step_runner, "check_agreement", ends) if is_victim else nullcontext():
        return attempt(lambda: new_pipeline().close())


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_ends_while_others_connect_is_named(failing_pool: Pool, victim: int) -> None:
    results = failing_pool.run(end_while_others_connect, victim, lost=(victim,))
    del results[victim]
    for outcome in results:
        assert outcome.error == "PipelineError"
        assert f"rank {victim} has ended: its process (pid" in outcome.text
        assert outcome.seconds < SOON * slowness()


def end_before_others_connect(victim: int) -> CallOutcome:
    """The victim ends while it waits for the others, which have not met it yet."""
    dist.barrier()  # some processes start late

    def end_once_the_detector_is_known() -> None:
        while process_detector.current_detector() is None:
            time.sleep(0.01)
        time.sleep(0.5)
        os._exit(3)

    if dist.get_rank() == victim:
        threading.Thread(target=end_once_the_detector_is_known).start()
    else:
        time.sleep(1.5)
    return attempt(lambda: new_pipeline().close())


@pytest.mark.parametrize("victim", [1, 3])
def test_a_process_that_ended_before_the_others_connect_is_named(failing_pool: Pool, victim: int) -> None:
    failing_pool.stop()  # the processes of a new job have not met
    results = failing_pool.run(end_before_others_connect, victim, lost=(victim,))
    del results[victim]
    for outcome in results:
        print_report(outcome.text)
        assert f"rank {victim} has ended: its process (pid" in outcome.text
        assert outcome.seconds < SOON * slowness()
