"""Whatever goes wrong in a step goes wrong on every rank, soon, with one report, and the next step works."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import StepFailedError
from penstock.runtime import Custom, Pipeline
from tests.distributed.conftest import Pools
from tests.distributed.faults import Fault, Told, attempt, bench, strikes
from tests.distributed.pool import Pool

pytestmark = pytest.mark.xdist_group("failures")

SOON = 5  # seconds
FAMILIES = [("1f1b", 4, False), ("interleaved-1f1b", 4, False), ("zbv", 4, False), ("dualpipev", 8, True)]


@pytest.fixture(scope="module")
def failing_pool() -> Iterator[Pool]:
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # each connection asks for its own name
    pool = Pool(4)
    yield pool
    pool.stop()


def show(report: str) -> None:
    """Put a report into what pytest shows of a test."""
    sys.stdout.write(report + "\n")


def assert_one_report(told: list[Told], within: float = SOON) -> None:
    """All ranks raised the same, and soon after the fault."""
    assert [each.error for each in told] == ["StepFailedError"] * len(told), told
    assert len({each.where for each in told}) == 1, [each.where for each in told]
    assert len({each.text for each in told}) == 1, [each.text for each in told]
    struck = max(each.struck for each in told)
    for each in told:
        assert each.calls > 1 or (each.at - struck if struck else each.seconds) < within, each


# --- exceptions ---------------------------------------------------------------------------------------


def strike_all(family: str, microbatches: int, *, everywhere: bool) -> list[tuple[Fault, Told]]:
    told = []
    with bench(family, microbatches) as one:
        for fault in strikes(family, dist.get_world_size(), microbatches, everywhere=everywhere):
            told.append((fault, one.suffer(fault)))
            if fault.action.endswith("RESHARD"):
                one.assert_right()
        one.assert_right()
    return told


@pytest.mark.parametrize(("family", "microbatches", "everywhere"), FAMILIES)
def test_an_exception_in_any_action_on_any_rank_is_reported_by_all(
    failing_pool: Pool, family: str, microbatches: int, *, everywhere: bool
) -> None:
    answers = failing_pool.run(partial(strike_all, everywhere=everywhere), family, microbatches, seconds=120)
    for each in zip(*answers, strict=True):
        fault: Fault = each[0][0]
        told: list[Told] = [answer for _, answer in each]
        assert_one_report(told)
        rank, action, stage, microbatch, kind = told[0].where
        assert (rank, action, kind) == (fault.rank, fault.action, "exception")
        assert action.lstrip("(").startswith(str(stage))
        assert microbatch is None or str(microbatch) in action
        report = told[0].text
        assert f"failed on rank {rank}, stage {stage}" in report
        assert f"StruckError: struck at {action}" in report
        assert "Traceback (most recent call last)" in told[0].details
        assert "in strike" in told[0].details
        for line in told[0].details.splitlines():
            assert line in report
        rows = [line.split() for line in report.splitlines() if line.startswith("    rank ")]
        assert [row[1] for row in rows] == list("0123")
        assert f"[{action}]" in rows[rank]
        assert rows[rank][-1] == "here"
        for one in told:
            assert one.cause == (f"StruckError('struck at {action}')" if one.rank == rank else "")


def strike_and_hold(fault: Fault) -> Told:
    with bench("1f1b", 4) as one:
        return one.suffer(fault, hold=3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_handles_its_error_for_long_keeps_nobody_waiting(failing_pool: Pool, rank: int) -> None:
    assert_one_report(failing_pool.run(strike_and_hold, Fault(rank, f"{rank}F2")), within=2)


def strike_in_a_pair() -> Told:
    with bench("dualpipev", 8) as one:
        return one.suffer(Fault(1, "6B2"))


def test_of_an_overlapped_pair_the_part_that_failed_is_named(failing_pool: Pool) -> None:
    told = failing_pool.run(strike_in_a_pair)
    assert_one_report(told)
    assert told[0].where == (1, "(1F6;6B2)OVERLAP_F_B", 6, 2, "exception")


def strike_without_text() -> Told:
    with bench("1f1b", 4, timeout=3) as one:
        return one.suffer(Fault(1, "1F1", "raise badly"))


def test_an_exception_without_a_text_is_reported_like_any_other(failing_pool: Pool) -> None:
    told = failing_pool.run(strike_without_text)
    assert_one_report(told, within=2)
    assert told[0].where == (1, "1F1", 1, 1, "exception")


def two_strikes() -> Told:
    with bench("1f1b", 4) as one:
        told = one.suffer(Fault(1, "1F1", seconds=0.5), Fault(2, "2F0", seconds=0.5))
        one.assert_right()
    return told


def test_of_two_exceptions_at_once_one_is_the_cause_everywhere(failing_pool: Pool) -> None:
    told = failing_pool.run(two_strikes)
    assert_one_report(told)
    assert told[0].where in {(1, "1F1", 1, 1, "exception"), (2, "2F0", 2, 0, "exception")}


def fail_in_the_loss() -> list[Told]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if broken:
            raise ZeroDivisionError("no such loss")
        return mse_loss(output, target)

    broken = False
    with bench("zbv", 4, loss=loss) as one:
        broken = True
        told = [one.suffer(Fault(-1, ""), call=call) for call in (one.step, one.evaluate)]
        broken = False
        one.assert_right()
    return told


def test_an_exception_in_the_loss_function_is_reported_by_all(failing_pool: Pool) -> None:
    for told in zip(*failing_pool.run(fail_in_the_loss), strict=True):
        assert_one_report(list(told))
        assert told[0].where == (0, "7F0", 7, 0, "exception")
        assert "ZeroDivisionError: no such loss" in told[0].text


def interrupt() -> Told:
    with bench("1f1b", 4, timeout=5) as one:
        told = one.suffer(Fault(2, "2F1", "interrupt"))
        one.assert_right()
    return told


def test_an_interrupt_stays_an_interrupt_where_it_came_and_is_reported_by_the_others(
    failing_pool: Pool,
) -> None:
    told = failing_pool.run(interrupt)
    assert told.pop(2).error == "KeyboardInterrupt"
    show(told[0].text)
    assert_one_report(told, within=3)
    assert told[0].where == (2, "2F1", 2, 1, "interrupted")


def fail_at_the_end() -> list[Told]:
    with bench("1f1b", 4) as one:
        told = [one.suffer(Fault(0, "0RESHARD", seconds=0.5), call=call) for call in (one.step, one.evaluate)]
        one.assert_right()
    return told


def test_who_finished_before_the_failure_hears_of_it_at_the_next_call(failing_pool: Pool) -> None:
    for told in zip(*failing_pool.run(fail_at_the_end), strict=True):
        assert_one_report(list(told))
        assert [each.calls for each in told] == [1, 2, 2, 2]
        assert told[0].where == (0, "0RESHARD", 0, None, "exception")


def exit_after_failing() -> Told:
    with bench("1f1b", 4) as one:
        told = one.suffer(Fault(0, "0F2"), Fault(2, "2F0", "nap", 3))
        if dist.get_rank() == 0:
            os._exit(1)
    return told


def test_the_cause_is_told_even_if_the_rank_with_the_store_has_exited_since(failing_pool: Pool) -> None:
    told = failing_pool.run(exit_after_failing, lost=(0,))[1:]
    show(told[1].text)
    assert [each.where for each in told] == [(0, "0F2", 0, 2, "exception")] * 3


# --- processes that die -------------------------------------------------------------------------------


def die(family: str, microbatches: int, faults: tuple[Fault, ...]) -> Told:
    with bench(family, microbatches) as one:
        return one.suffer(*faults)


def assert_lost(told: list[Told], rank: int) -> None:
    del told[rank]
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where[-1] == "lost"
    assert f"rank {rank}" in told[0].text.splitlines()[1]
    assert re.search(rf"rank {rank} +does not answer", told[0].text)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("1f1b", Fault(1, "1F2", "kill", 0.8)),
        ("1f1b", Fault(2, "2SEND_B1", "kill")),
        ("zbv", Fault(3, "3I1", "kill", 0.8)),
    ],
    ids=str,
)
def test_a_rank_that_dies_while_others_wait_is_named_by_all(
    failing_pool: Pool, family: str, fault: Fault
) -> None:
    assert_lost(failing_pool.run(die, family, 4, (fault,), lost=(fault.rank,)), fault.rank)


@pytest.mark.parametrize(
    ("family", "faults"),
    [
        ("1f1b", (Fault(3, "3RECV_F0", "kill"), Fault(2, "2SEND_F0", "nap", 0.8))),
        ("zbv", (Fault(2, "2W2", "kill", 0.8),)),
        ("1f1b", (Fault(3, "3RESHARD", "kill", 0.8),)),
    ],
    ids=["sending", "ending a send", "losses"],
)
def test_a_rank_that_dies_while_others_do_not_wait_for_its_messages_is_named_by_all(
    failing_pool: Pool, family: str, faults: tuple[Fault, ...]
) -> None:
    assert_lost(failing_pool.run(die, family, 4, faults, lost=(faults[0].rank,)), faults[0].rank)


def test_the_death_of_the_rank_with_the_store_is_said_clearly(failing_pool: Pool) -> None:
    told = failing_pool.run(die, "1f1b", 4, (Fault(0, "0F2", "kill", 0.5),), lost=(0,))[1:]
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where[-1] == "lost"
    assert "the process that hosts it is gone" in told[0].text
    assert "rank -1" not in told[0].text
    assert "None" not in told[0].text


# --- too slow -----------------------------------------------------------------------------------------


def sleep_too_long(fault: Fault) -> Told:
    with bench("1f1b", 4, timeout=2) as one:
        told = one.suffer(fault)
        one.assert_right()
    return told


@pytest.mark.parametrize("fault", [Fault(1, "1F1", "nap", 4)], ids=str)
def test_a_rank_that_takes_too_long_is_shown_computing_and_the_others_waiting(
    failing_pool: Pool, fault: Fault
) -> None:
    told = failing_pool.run(sleep_too_long, fault)
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where[-1] == "timeout"
    rows = [line for line in told[0].text.splitlines() if line.startswith("    rank ")]
    for rank, row in enumerate(rows):
        assert ("waits for" in row and "from rank" in row) == (rank != fault.rank)
    assert f"[{fault.action}]" in rows[fault.rank]
    for each in told:
        assert each.seconds < (6 if each.rank == fault.rank else 4), each


def refuse_tokens() -> Told:
    def count(target: Tensor) -> int:
        if broken:
            raise LookupError("no such token")
        return len(target)

    broken = False
    with bench("1f1b", 4, tokens=count) as one:
        broken = True
        told = one.suffer(Fault(-1, ""))
        broken = False
        one.assert_right()
    return told


def test_an_error_before_the_first_action_of_a_rank_is_reported_by_all(failing_pool: Pool) -> None:
    told = failing_pool.run(refuse_tokens)
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where == (3, None, None, None, "exception")
    assert "LookupError: no such token" in told[0].text


def stay_away() -> Told | None:
    with bench("1f1b", 4, timeout=2) as one:
        dist.barrier()
        told = None if dist.get_rank() == 3 else attempt(one.step)
        dist.barrier()
        return attempt(one.step) if told is None else told


def test_ranks_that_one_does_not_join_end_at_the_timeout_and_it_hears_of_it_when_it_comes(
    failing_pool: Pool,
) -> None:
    told = failing_pool.run(stay_away)
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where[-1] == "timeout"
    assert re.search("rank 3 +is in neither step nor eval", told[0].text)


def mix_calls(first: str) -> Told:
    with bench("1f1b", 4, timeout=2) as one:
        other = {"step": one.evaluate, "evaluate": one.step}[first]
        dist.barrier()
        told = attempt(getattr(one, first) if dist.get_rank() == 0 else other)
        one.assert_right()
    return told


@pytest.mark.parametrize(
    "first",
    [
        "step",
        "evaluate",
    ],
)
def test_a_step_on_one_rank_and_an_eval_on_the_others_end_at_the_timeout(
    failing_pool: Pool, first: str
) -> None:
    told = failing_pool.run(mix_calls, first)
    show(told[0].text)
    assert_one_report(told)
    assert told[0].where[-1] == "timeout"


def test_the_report_says_who_is_in_a_step_and_who_in_an_eval(failing_pool: Pool) -> None:
    rows = [line for line in failing_pool.run(mix_calls, "step")[0].text.splitlines() if "    rank" in line]
    assert ["eval" in row for row in rows] == [False, True, True, True]


# --- numbers ------------------------------------------------------------------------------------------


def poison(family: str, where: str, *, checks: bool) -> Told:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * (torch.nan if where == "loss" and one.action == "3F1" else 1)

    with bench(family, 4, check_finite=checks, loss=loss) as one:
        one.poison = where
        told = one.suffer(Fault(-1, ""))
        one.poison = where = ""
        one.assert_right()
    return told


@pytest.mark.parametrize(
    ("family", "where", "found"),
    [
        ("1f1b", "1F2", (1, "1F2", 1, 2, "in its output")),
        ("1f1b", "loss", (3, "3F1", 3, 1, "in its loss")),
        ("1f1b", "2B1", (2, "2B1", 2, 1, "in the gradient of its input")),
        ("zbv", "4B1", (3, "4I1", 4, 1, "in the gradient of its input")),
        ("1f1b", "0B1", (0, "0B1", 0, 1, "in the gradient of 0.weight")),
    ],
)
def test_the_first_number_that_is_not_finite_is_found(
    failing_pool: Pool, family: str, where: str, found: tuple[int, str, int, int, str]
) -> None:
    told = failing_pool.run(partial(poison, checks=True), family, where)
    show(told[0].text)
    assert_one_report(told)
    *place, what = found
    assert told[0].where == (*place, "exception")
    assert re.search(rf"stage {place[2]}: (\d+) of \1 numbers {what}", told[0].text)


@pytest.mark.parametrize("where", ["1F2", "loss", "2B1"])
def test_numbers_that_are_not_finite_are_let_through_unless_asked(failing_pool: Pool, where: str) -> None:
    assert {each.error for each in failing_pool.run(partial(poison, checks=False), "1f1b", where)} == {""}


class Widens(nn.Module):
    """Gives one row too many for one microbatch."""

    def __init__(self, usual: nn.Module, at: int) -> None:
        super().__init__()
        self.usual, self.at, self.calls = usual, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.usual(x)
        return torch.cat([x, x], 1) if self.calls == self.at + 1 else x


class ShortensBack(torch.autograd.Function):
    """Gives a gradient with a row too few."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[:-1]


def give_a_wrong_shape(*, back: bool) -> Told:
    def shorten(_module: nn.Module, _x: object, output: Tensor) -> Tensor:
        return ShortensBack.apply(output)  # type: ignore[no-untyped-call, no-any-return]

    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(4, 4) for _ in range(4)]
    if back:
        stages[1].register_forward_hook(shorten)
    else:
        stages[1] = Widens(stages[1], at=2)
    pipeline = Pipeline(dict(enumerate(stages)), "1f1b", microbatches=4, loss=mse_loss, timeout=20)
    dist.barrier()
    told = attempt(lambda: pipeline.step(torch.randn(8, 4), target=torch.randn(8, 4)))
    pipeline.close()
    return told


def test_a_wrong_shape_is_named_by_the_stage_that_cannot_take_it(failing_pool: Pool) -> None:
    told = failing_pool.run(partial(give_a_wrong_shape, back=False))
    assert_one_report(told)
    assert told[0].where == (2, "2F2", 2, 2, "exception")
    assert "mat1 and mat2 shapes cannot be multiplied" in told[0].text


def test_a_wrong_shape_of_a_gradient_is_named_by_the_stage_that_made_it(failing_pool: Pool) -> None:
    told = failing_pool.run(partial(give_a_wrong_shape, back=True))
    assert_one_report(told)
    assert told[0].where == (1, "1B0", 1, 0, "exception")
    assert "ShortensBackBackward returned an invalid gradient" in told[0].text


# --- after the failure --------------------------------------------------------------------------------


def fail_and_look(family: str) -> None:
    with bench(family, 4) as one:
        parts = [part for module in one.pipeline.modules.values() for part in module.modules()]
        parts[-1].eval()
        flags = [part.training for part in parts]
        one.assert_right()
        for call in (one.step, one.step, one.step, one.evaluate):
            assert one.suffer(Fault(2, "2F2"), Fault(1, "1F3"), call=call).error == "StepFailedError"
            assert [part.training for part in parts] == flags
            assert not [part for part in parts if "forward" in part.__dict__]
        one.assert_right()
        assert one.evaluate() == one.loss


@pytest.mark.parametrize("family", ["1f1b", "zbv"])
def test_after_failures_the_modules_are_as_before_and_steps_are_right(failing_pool: Pool, family: str) -> None:
    failing_pool.run(fail_and_look, family)


# --- connecting ---------------------------------------------------------------------------------------


def disagree(what: str) -> Told:
    odd = dist.get_rank() == 2
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    microbatches = 8 if odd and what == "microbatches" else 4
    family = "gpipe" if odd and what == "schedule" else "1f1b"
    version = "0.0.odd" if odd and what == "version" else penstock.__version__
    with mock.patch.object(penstock, "__version__", version):
        return attempt(lambda: Pipeline(stages, family, microbatches=microbatches, loss=mse_loss, timeout=10))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("microbatches", "microbatches: rank 0, 1, 3: 4; rank 2: 8"),
        ("schedule", r"schedule: rank 0, 1, 3: 1f1b \(\w+\); rank 2: \S+ \(\w+\)"),
        ("version", r"version of penstock: rank 0, 1, 3: \S+; rank 2: 0.0.odd"),
    ],
)
def test_ranks_that_disagree_are_refused_with_one_message(failing_pool: Pool, what: str, said: str) -> None:
    told = failing_pool.run(disagree, what)
    show(told[0].text)
    assert [each.error for each in told] == ["PipelineError"] * 4
    assert len({each.text for each in told}) == 1
    assert re.search(said, told[0].text)
    assert max(each.seconds for each in told) < SOON + 5


def connect(timeout: float) -> None:
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=timeout).close()


def connect_alone(rank: int) -> Told | None:
    return attempt(lambda: connect(1)) if dist.get_rank() == rank else None


def connect_later(rank: int) -> Told:
    connect_alone(rank)
    dist.barrier()
    time.sleep(0.3 if dist.get_rank() == 0 else 0)
    return attempt(lambda: connect(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_connects_alone_is_told_so_after_the_timeout(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()  # for a store that nobody has met at
    told = failing_pool.run(connect_alone, rank)[rank]
    failing_pool.stop()
    show(told.text)
    assert told.seconds < SOON
    assert told.error == "PipelineError"


@pytest.mark.parametrize(
    "rank",
    [
        0,
        1,
    ],
)
def test_after_a_rank_connected_alone_all_connect_together(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()
    told = failing_pool.run(connect_later, rank, seconds=8)
    assert [each.error for each in told] == [""] * 4, told


# --- Ctrl-C while a message is waited for -------------------------------------------------------------


def press_while_waiting() -> str:
    """Rank 0 is interrupted while it waits for rank 1, which takes a nap."""
    x, y = torch.randn(2, 4, 4)
    naps = [0.0]

    def slow(custom: Custom) -> None:
        time.sleep(naps[0])
        custom.run()

    functions: dict[Any, Any] = {"B": slow} if dist.get_rank() == 1 else {}
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, functions=functions, timeout=10) as pipeline:
        naps[0] = 0.4
        try:
            if dist.get_rank() == 0:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            pipeline.step(x, target=y)
            pipeline.step(x, target=y)
        except BaseException as error:  # noqa: BLE001 -- an interrupt is what is looked for
            told = type(error).__name__
        naps[0] = 0.0
        pipeline.step(x, target=y)  # all ranks are in step again
    return told


def test_ctrl_c_while_waiting_is_told_to_all_and_the_next_step_works(pools: Pools) -> None:
    assert pools(2).run(press_while_waiting) == ["KeyboardInterrupt", "StepFailedError"]


def merge_unequal() -> str:
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    rows = [torch.ones(1, 2, 4), torch.ones(1, 3, 4)]
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=10) as pipeline:
        try:
            pipeline.eval(rows, return_outputs=True)
        except StepFailedError as error:
            return f"{error.rank}: {error}"
    return "nothing"


def test_outputs_that_cannot_be_merged_are_told_to_all(pools: Pools) -> None:
    told = pools(2).run(merge_unequal)
    assert told[0] == told[1]
    assert told[0].startswith("1: ")
    assert "outputs are merged along dimension 0 and agree in all others" in told[0]
