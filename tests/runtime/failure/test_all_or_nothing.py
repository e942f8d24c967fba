"""Promise: a step ends with a result on all ranks or on none, so ranks agree on which batches were trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from penstock.errors import StepFailedError
from penstock.runtime import ActionCall, Pipeline
from penstock.runtime.session.agreement import StepCommit
from tests.support.call_outcomes import SOON, attempt
from tests.support.faults import (
    ROWS,
    WIDTH,
    Fault,
    FaultyPipeline,
    faults_of_each_kind,
    faulty_pipeline,
    schedule_of,
)
from tests.support.grids import is_full, small
from tests.support.linear_stages import linear, mesh_of_four, numbers, pipeline_of
from tests.support.pool import Pool, Pools
from tests.support.slowness import slowness

Batch = tuple[Tensor, Tensor]


def batches(count: int, microbatches: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(count, 2, microbatches * ROWS, WIDTH, generator=generator)
    return [(x, y) for x, y in drawn]


def faults_everywhere(family: str, ranks: int, microbatches: int, effect: str = "raise") -> list[Fault]:
    """One for each action of each rank."""
    rows = schedule_of(family, ranks, microbatches).ranks
    return [Fault(rank, str(step), effect) for rank, row in enumerate(rows) for step in row]


def train(one: FaultyPipeline, given: Sequence[Batch], faults: Sequence[Fault]) -> Iterator[int]:
    """The usual loop: it repeats a batch after a failure. Each batch has a fault; gives the trained batches."""
    optimizer = torch.optim.SGD(one.pipeline.parameters(), lr=0.1)
    index, failed = 0, -1
    while index < len(given):
        one.faults = () if failed == index else tuple(faults[index : index + 1])
        x, y = given[index]
        begin, report = time.monotonic(), ""
        try:
            one.pipeline.step(x, target=y)
        except StepFailedError as error:
            failed, report = index, str(error)
        else:
            optimizer.step()
            yield index
            index += 1
        optimizer.zero_grad()
        seconds = time.monotonic() - begin
        assert not report or seconds < SOON * slowness(), (seconds, faults[index], report)


# --- exceptions ----------------------------------------------------------------------------------


def train_with_exceptions(family: str, microbatches: int, faults: Sequence[Fault]) -> list[str]:
    """What is wrong with training in which actions of all ranks fail once."""
    given = batches(len(faults) + 1, microbatches)
    with faulty_pipeline(family, microbatches) as one:
        trained = list(train(one, given, faults))
        parameters = {stage: list(module.parameters()) for stage, module in one.pipeline.modules.items()}
    if trained != list(range(len(given))):
        return [f"trained on {trained}"]
    optimizer = torch.optim.SGD(one.reference.parameters(), lr=0.1)
    for x, y in given:
        for rows, targets in zip(x.chunk(microbatches), y.chunk(microbatches)):
            (mse_loss(one.reference(rows), targets) / microbatches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [
        f"stage {stage} was trained on other batches"
        for stage, found in parameters.items()
        if not all(map(torch.allclose, found, one.reference[stage].parameters()))
    ]


GRID = [("1f1b", 2, 3), ("gpipe", 2, 2), ("zbv", 2, 3), ("interleaved-1f1b", 2, 2), ("dualpipev", 2, 4)]
GRID += [("1f1b", 4, 2)]


@pytest.mark.parametrize(("family", "ranks", "microbatches"), GRID)
@small(lambda family, ranks: (family, ranks) == ("1f1b", 2))
def test_an_exception_in_any_action_leaves_all_ranks_at_the_same_batch(
    pools: Pools, family: str, ranks: int, microbatches: int
) -> None:
    faults = faults_of_each_kind(family, ranks, microbatches, everywhere=True)
    if is_full():
        faults = faults_everywhere(family, ranks, microbatches)
    problems = pools(ranks).run(train_with_exceptions, family, microbatches, faults, seconds=1200)
    assert problems == [[]] * ranks


# --- processes that die ----------------------------------------------------------------------------


def train_until_killed(fault: Fault, folder: str) -> str:
    """Train until a rank dies in the third batch; all write down what they have trained on."""
    log = Path(folder) / f"{dist.get_rank()}.json"
    with faulty_pipeline("1f1b", 2) as one:
        for index, (x, y) in enumerate(batches(5, 2)):
            one.faults = (fault,) * (index == 2)
            outcome = attempt(lambda x=x, y=y: one.pipeline.step(x, target=y))  # type: ignore[misc]
            if outcome.error:
                return outcome.error
            log.write_text(f"{index}", encoding="utf-8")
    return ""


KILLED = faults_everywhere("1f1b", 2, 2, "kill")
"""A death at every action of every rank."""


def is_last_action(fault: Fault) -> bool:
    return fault.action == str(schedule_of("1f1b", 2, 2).ranks[fault.rank][-1])


@pytest.mark.parametrize("fault", KILLED, ids=str)
@small(is_last_action)
def test_a_rank_that_dies_in_any_action_leaves_all_ranks_at_the_same_batch(
    pools: Pools, tmp_path: Path, fault: Fault
) -> None:
    errors = pools(2).run(train_until_killed, fault, str(tmp_path), lost=(fault.rank,))
    del errors[fault.rank]
    assert errors == ["StepFailedError"]
    assert [(tmp_path / f"{rank}.json").read_text(encoding="utf-8") for rank in range(2)] == ["1"] * 2


# --- several pipelines that train one model --------------------------------------------------------


def fail_in_one_pipeline(kind: str) -> list[str]:
    """World rank 0 fails in its last action of the second step; the other pipeline has finished its actions."""

    def fail_at_the_end(custom: ActionCall) -> None:
        custom.run()
        if broken and dist.get_rank() == 0:
            raise ZeroDivisionError("too late")

    mesh = mesh_of_four(kind)
    broken, module = False, linear(mesh.get_coordinate()[0]).double()  # type: ignore[index]
    if kind == "tp":
        module = parallelize_module(module, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))  # type: ignore[assignment]
    options: dict[str, Any] = {"replicas": mesh["dp"]} if kind == "dp" else {}
    outcomes, functions = [], {"RESHARD": fail_at_the_end}
    pipeline = pipeline_of(module, mesh, timeout=60, functions=functions, **options)
    for step in range(2):
        broken = step == 1
        dist.barrier()
        outcomes.append(attempt(lambda: pipeline.step(numbers(0, 4, WIDTH), target=numbers(1, 4, WIDTH))))
    return [each.error for each in outcomes]


@pytest.mark.parametrize("kind", ["dp", "tp"])
def test_a_failure_in_one_pipeline_fails_the_step_in_all_that_train_the_model(
    failing_pool: Pool, kind: str
) -> None:
    errors = failing_pool.run(fail_in_one_pipeline, kind)
    failing_pool.stop()  # all groups are aborted
    assert errors == [["", "StepFailedError"]] * 4


# --- ranks that are ahead --------------------------------------------------------------------------


def pipeline_of_two() -> Pipeline:
    stages = {stage: nn.Linear(WIDTH, WIDTH) for stage in range(2)}
    return Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=60)


def interrupt_at_the_end() -> list[tuple[str, str]]:
    """Rank 0 is interrupted when the step has already succeeded on rank 1, and repeats the batch."""
    (x, y), finish = batches(1, 2)[0], StepCommit.finish
    interrupts = [True]

    def interrupted(exchange: StepCommit, weights: Sequence[float]) -> object:
        result = finish(exchange, weights)
        if dist.get_rank() == 0 and interrupts.pop():
            dist.barrier()
            raise KeyboardInterrupt
        return result

    outcomes = []
    pipeline = pipeline_of_two()
    with mock.patch.object(StepCommit, "finish", interrupted):
        outcomes.append(attempt(lambda: pipeline.step(x, target=y)))
    if dist.get_rank():
        dist.barrier()
    outcomes += [attempt(lambda: pipeline.step(x, target=y)) for _ in range(2 + dist.get_rank())]
    pipeline = pipeline_of_two()
    outcomes.append(attempt(lambda: pipeline.step(x, target=y)))
    pipeline.close()
    return [(each.error, each.text) for each in outcomes]


def test_a_rank_that_is_ahead_is_told_at_every_call_until_the_pipeline_is_created_again(pools: Pools) -> None:
    behind, ahead = pools(2).run(interrupt_at_the_end)
    assert [error for error, _ in behind] == ["KeyboardInterrupt", "PipelineError", "PipelineError", ""]
    assert [error for error, _ in ahead] == ["", "StepFailedError", "PipelineError", "PipelineError", ""]
    assert behind[1] == behind[2] == ahead[2] == ahead[3]
    assert "completed calls of step() and eval(): rank 0: 0; rank 1: 1" in ahead[2][1]
    assert "create the pipeline again on every rank" in ahead[2][1]
