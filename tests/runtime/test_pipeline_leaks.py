"""Promise: nothing leaks, in long runs or after failures: threads, processes, descriptors, tensors, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline
from tests.support.faults import Fault, faulty_pipeline, schedule_of
from tests.support.grids import repetitions, small
from tests.support.pool import Pool
from tests.support.resources import children, live_tensors, new_threads, resident, settled_descriptors

WARM_UP, STEPS = 30, repetitions(60, 26)
"""At least twice as many as there are shapes that change."""
TIMES = repetitions(12, 5)
"""More than the descriptors that may be closed late."""
SLACK = 3 * 2**20  # bytes; what allocators and caches move by


@pytest.fixture(scope="module")
def leaking_pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


def small_pipeline(family: str, microbatches: int = 4) -> Pipeline:
    schedule = schedule_of(family, dist.get_world_size(), microbatches)
    stages = {stage: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for stage in range(schedule.num_stages)}
    return Pipeline(stages, schedule, loss=mse_loss, timeout=120)


# --- steps --------------------------------------------------------------------------------------------


def run_long(
    family: str, way: str, warm_up: int, steps: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Tensors, descriptors and memory after a warm-up, and after many steps more."""
    pipeline = small_pipeline(family)

    def one(number: int) -> None:
        rows = 4 * (1 + number * 7 % 13) if way == "changing shapes" else 8
        x, y = torch.randn(2, rows, 4)
        if way == "step and eval" and number % 2:
            pipeline.eval(x, target=y)
        else:
            pipeline.step(x, target=y)

    found = []
    for begin, end in ((0, warm_up), (warm_up, warm_up + steps)):
        for number in range(begin, end):
            one(number)
        found.append((live_tensors(), settled_descriptors(), resident()))
    pipeline.close()
    before, after = found
    return before, after


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("interleaved-1f1b", "step and eval"),
        ("zbv", "changing shapes"),
        *((family, "steps") for family in ("1f1b", "interleaved-zero-bubble", "zb-h2", "dualpipev")),
    ],
)
@small(lambda family, way: (family, way) in {("1f1b", "steps"), ("interleaved-1f1b", "step and eval")})
def test_steps_leave_nothing_behind(leaking_pool: Pool, family: str, way: str) -> None:
    for before, after in leaking_pool.run(run_long, family, way, WARM_UP, STEPS):
        assert after[0] - before[0] <= (8 if way == "changing shapes" else 0)  # buffers that wait for use
        assert after[1] <= before[1]
        assert after[2] - before[2] < SLACK


# --- pipelines ----------------------------------------------------------------------------------------


def construct_often(end: str, times: int) -> tuple[int, int, list[str], list[str], int]:
    """Descriptors before and after, threads and processes left, and the growth of memory."""
    x, y = torch.randn(2, 8, 4)

    def once() -> None:
        pipeline = small_pipeline("zbv")
        pipeline.step(x, target=y)
        if end == "close":
            pipeline.close()

    for _ in range(3):
        once()
    before, memory, threads = settled_descriptors(), resident(), threading.enumerate()
    for _ in range(times):
        once()
    left = new_threads(threads)
    return before, settled_descriptors(), left, children(), resident() - memory


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_pipeline_that_is_closed_or_deleted_leaves_nothing_behind(leaking_pool: Pool, end: str) -> None:
    for before, after, threads, processes, growth in leaking_pool.run(construct_often, end, TIMES):
        assert threads == []
        assert processes == []
        assert after <= before + 3  # the store closes its ends a little later
        assert growth < SLACK


def fail_often(times: int) -> tuple[int, int, int, int, list[str]]:
    """Descriptors and tensors before and after, and processes left."""
    with faulty_pipeline("zbv", 4) as one:

        def once() -> None:
            assert one.run_with_faults(Fault(1, "1F2")).error == "StepFailedError"
            one.assert_correct()

        return *grown(once, times), children()


def grown(once: Callable[[], None], times: int) -> tuple[int, int, int, int]:
    for _ in range(3):
        once()
    time.sleep(0.5)  # for threads to end
    before = settled_descriptors(), live_tensors()
    for _ in range(times):
        once()
    time.sleep(0.5)
    return before[0], settled_descriptors(), before[1], live_tensors()


def test_failed_steps_leave_nothing_behind(leaking_pool: Pool) -> None:
    for before, after, tensors, tensors_after, processes in leaking_pool.run(fail_often, TIMES):
        assert processes == []
        assert after <= before + 3
        assert tensors_after <= tensors


def close_often(times: int) -> tuple[int, int, int, int]:
    pipeline = small_pipeline("1f1b")
    x, y = torch.randn(2, 8, 4)

    def once() -> None:
        pipeline.step(x, target=y)
        pipeline.close()

    return grown(once, times)


def test_a_pipeline_that_is_closed_and_used_again_leaves_nothing_behind(leaking_pool: Pool) -> None:
    for before, after, tensors, tensors_after in leaking_pool.run(close_often, TIMES):
        assert after <= before + 3
        assert tensors_after <= tensors


def threads_after_failure() -> list[str]:
    def once() -> None:
        with faulty_pipeline("1f1b", 4) as one:
            one.run_with_faults(Fault(1, "1F2"))

    once()  # what is created once for all pipelines
    before = threading.enumerate()
    once()
    gc.collect()
    return new_threads(before)


def test_a_failed_step_leaves_no_thread_behind(leaking_pool: Pool) -> None:
    assert leaking_pool.run(threads_after_failure) == [[], []]
