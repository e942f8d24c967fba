"""Promise: an exception in a step ends it on every rank, soon, with one report."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline
from penstock.runtime.session.step_runner import race_seconds
from penstock.runtime.transport.transport_errors import TransportError
from tests.support.call_outcomes import CallOutcome, assert_one_report, attempt, print_report
from tests.support.faults import Fault, faults_of_each_kind, faulty_pipeline
from tests.support.grids import small
from tests.support.pool import Pool

FAMILIES = [("1f1b", 4, False), ("interleaved-1f1b", 4, False), ("zbv", 4, False), ("dualpipev", 8, True)]


# --- causes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), 2.5),
        (dist.DistBackendError("NCCL error"), 2.5),
        (TransportError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out", timed_out=True), 0.25),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0.25),
        (ValueError("too few rows"), 0),
    ],
)
def test_an_error_waits_for_the_failure_elsewhere_that_it_may_follow_from(
    error: Exception, seconds: float
) -> None:
    assert race_seconds(error) == seconds


# --- exceptions ----------------------------------------------------------------------------------


def inject_all(family: str, microbatches: int, *, everywhere: bool) -> list[tuple[Fault, CallOutcome]]:
    outcomes = []
    with faulty_pipeline(family, microbatches) as one:
        for fault in faults_of_each_kind(family, dist.get_world_size(), microbatches, everywhere=everywhere):
            outcomes.append((fault, one.run_with_faults(fault)))
            if fault.action.endswith("RESHARD"):
                one.assert_correct()
        one.assert_correct()
    return outcomes


@pytest.mark.parametrize(("family", "microbatches", "everywhere"), FAMILIES)
@small(lambda family: family == "zbv")
def test_an_exception_in_any_action_on_any_rank_is_reported_by_all(
    failing_pool: Pool, family: str, microbatches: int, *, everywhere: bool
) -> None:
    answers = failing_pool.run(partial(inject_all, everywhere=everywhere), family, microbatches, seconds=600)
    for each in zip(*answers, strict=True):
        fault: Fault = each[0][0]
        outcomes: list[CallOutcome] = [answer for _, answer in each]
        assert_one_report(outcomes)
        rank, action, stage, microbatch, kind = outcomes[0].where
        assert (rank, action, kind) == (fault.rank, fault.action, "exception")
        assert action.lstrip("(").startswith(str(stage))
        assert microbatch is None or str(microbatch) in action
        report = outcomes[0].text
        assert f"failed on rank {rank}, stage {stage}" in report
        assert f"InjectedError: injected at {action}" in report
        assert "Traceback (most recent call last)" in outcomes[0].details
        assert "in inject" in outcomes[0].details
        for line in outcomes[0].details.splitlines():
            assert line in report
        rows = [line.split() for line in report.splitlines() if line.startswith("    rank ")]
        assert [row[1] for row in rows] == list("0123")
        assert f"[{action}]" in rows[rank]
        assert rows[rank][-1] == "here"
        for one in outcomes:
            assert one.cause == (f"InjectedError('injected at {action}')" if one.rank == rank else "")


def inject_and_hold(fault: Fault) -> CallOutcome:
    with faulty_pipeline("1f1b", 4) as one:
        return one.run_with_faults(fault, hold=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_handles_its_error_for_long_keeps_nobody_waiting(failing_pool: Pool, rank: int) -> None:
    assert_one_report(failing_pool.run(inject_and_hold, Fault(rank, f"{rank}F2")))


def inject_in_a_pair() -> CallOutcome:
    with faulty_pipeline("dualpipev", 8) as one:
        return one.run_with_faults(Fault(1, "6B2"))


def test_of_an_overlapped_pair_the_part_that_failed_is_named(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(inject_in_a_pair)
    assert_one_report(outcomes)
    assert outcomes[0].where == (1, "(1F6;6B2)OVERLAP_F_B", 6, 2, "exception")


def inject_without_text() -> CallOutcome:
    with faulty_pipeline("1f1b", 4) as one:
        return one.run_with_faults(Fault(1, "1F1", "raise badly"))


def test_an_exception_without_a_text_is_reported_like_any_other(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(inject_without_text)
    assert_one_report(outcomes)
    assert outcomes[0].where == (1, "1F1", 1, 1, "exception")


def inject_two() -> CallOutcome:
    with faulty_pipeline("1f1b", 4) as one:
        outcome = one.run_with_faults(Fault(1, "1F1", seconds=0.5), Fault(2, "2F0", seconds=0.5))
        one.assert_correct()
    return outcome


def test_of_two_exceptions_at_once_one_is_the_cause_everywhere(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(inject_two)
    assert_one_report(outcomes)
    assert outcomes[0].where in {(1, "1F1", 1, 1, "exception"), (2, "2F0", 2, 0, "exception")}


def fail_in_the_loss() -> list[CallOutcome]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if broken:
            raise ZeroDivisionError("no such loss")
        return mse_loss(output, target)

    broken = False
    with faulty_pipeline("zbv", 4, loss=loss) as one:
        broken = True
        outcomes = [one.run_with_faults(Fault(-1, ""), call=call) for call in (one.step, one.evaluate)]
        broken = False
        one.assert_correct()
    return outcomes


def test_an_exception_in_the_loss_function_is_reported_by_all(failing_pool: Pool) -> None:
    for outcomes in zip(*failing_pool.run(fail_in_the_loss), strict=True):
        assert_one_report(list(outcomes))
        assert outcomes[0].where == (0, "7F0", 7, 0, "exception")
        assert "ZeroDivisionError: no such loss" in outcomes[0].text


def interrupt() -> CallOutcome:
    with faulty_pipeline("1f1b", 4) as one:
        outcome = one.run_with_faults(Fault(2, "2F1", "interrupt"))
        one.assert_correct()
    return outcome


def test_an_interrupt_is_raised_where_it_came_and_reported_by_the_others(
    failing_pool: Pool,
) -> None:
    outcomes = failing_pool.run(interrupt)
    assert outcomes.pop(2).error == "KeyboardInterrupt"
    print_report(outcomes[0].text)
    assert_one_report(outcomes)
    assert outcomes[0].where == (2, "2F1", 2, 1, "interrupted")


def fail_at_the_end() -> list[CallOutcome]:
    with faulty_pipeline("1f1b", 4) as one:
        outcomes = [
            one.run_with_faults(Fault(0, "0RESHARD", seconds=0.5), call=call)
            for call in (one.step, one.evaluate)
        ]
        one.assert_correct()
    return outcomes


def test_a_failure_after_others_have_finished_ends_the_same_call_on_all_ranks(failing_pool: Pool) -> None:
    for outcomes in zip(*failing_pool.run(fail_at_the_end), strict=True):
        assert_one_report(list(outcomes))
        assert outcomes[0].where == (0, "0RESHARD", 0, None, "exception")


def exit_after_failing() -> CallOutcome:
    with faulty_pipeline("1f1b", 4) as one:
        outcome = one.run_with_faults(Fault(0, "0F2"), Fault(2, "2F0", "nap", 3))
        if dist.get_rank() == 0:
            os._exit(1)
    return outcome


def test_the_cause_is_reported_even_if_the_rank_with_the_store_has_exited_since(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(exit_after_failing, lost=(0,))[1:]
    print_report(outcomes[1].text)
    assert [each.where for each in outcomes] == [(0, "0F2", 0, 2, "exception")] * 3


# --- numbers -------------------------------------------------------------------------------------


def nan_at(family: str, where: str, *, checks: bool) -> CallOutcome:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * (torch.nan if where == "loss" and one.action == "3F1" else 1)

    with faulty_pipeline(family, 4, check_finite=checks, loss=loss) as one:
        one.nan_at = where
        outcome = one.run_with_faults(Fault(-1, ""))
        one.nan_at = where = ""
        one.assert_correct()
    return outcome


@pytest.mark.parametrize(
    ("family", "where", "found"),
    [
        ("1f1b", "1F2", (1, "1F2", 1, 2, "its output")),
        ("1f1b", "loss", (3, "3F1", 3, 1, "its loss")),
        ("1f1b", "2B1", (2, "2B1", 2, 1, "the gradient of its input")),
        ("zbv", "4B1", (3, "4I1", 4, 1, "the gradient of its input")),
        ("1f1b", "0B1", (0, "0B1", 0, 1, "the gradient of 0.weight")),
    ],
)
def test_the_first_number_that_is_not_finite_is_found(
    failing_pool: Pool, family: str, where: str, found: tuple[int, str, int, int, str]
) -> None:
    outcomes = failing_pool.run(partial(nan_at, checks=True), family, where)
    print_report(outcomes[0].text)
    assert_one_report(outcomes)
    *place, what = found
    assert outcomes[0].where == (*place, "exception")
    assert re.search(rf"stage {place[2]}: (\d+) of \1 elements of {what}", outcomes[0].text)


@pytest.mark.parametrize("where", ["1F2", "loss", "2B1"])
def test_numbers_that_are_not_finite_are_let_through_unless_asked(failing_pool: Pool, where: str) -> None:
    assert {each.error for each in failing_pool.run(partial(nan_at, checks=False), "1f1b", where)} == {""}


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


def give_a_wrong_shape(*, back: bool) -> CallOutcome:
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
    outcome = attempt(lambda: pipeline.step(torch.randn(8, 4), target=torch.randn(8, 4)))
    pipeline.close()
    return outcome


def test_a_wrong_shape_is_named_by_the_stage_that_cannot_take_it(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(partial(give_a_wrong_shape, back=False))
    assert_one_report(outcomes)
    assert outcomes[0].where == (2, "2F2", 2, 2, "exception")
    assert "mat1 and mat2 shapes cannot be multiplied" in outcomes[0].text


def test_a_wrong_shape_of_a_gradient_is_named_by_the_stage_that_made_it(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(partial(give_a_wrong_shape, back=True))
    assert_one_report(outcomes)
    assert outcomes[0].where == (1, "1B0", 1, 0, "exception")
    assert "ShortensBackBackward returned an invalid gradient" in outcomes[0].text
