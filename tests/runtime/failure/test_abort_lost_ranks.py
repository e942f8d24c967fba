"""Promise: a process that dies or takes too long is named by all others, and no rank waits for ever."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.support.call_outcomes import CallOutcome, assert_one_report, attempt, print_report
from tests.support.faults import Fault, faulty_pipeline
from tests.support.pool import Pool
from tests.support.slowness import slowness


def assert_timed_out(outcomes: list[CallOutcome]) -> None:
    print_report(outcomes[0].text)
    assert_one_report(outcomes)
    assert outcomes[0].where[-1] == "timeout"


# --- processes that die --------------------------------------------------------------------------


def die(family: str, microbatches: int, faults: tuple[Fault, ...]) -> CallOutcome:
    with faulty_pipeline(family, microbatches) as one:
        return one.run_with_faults(*faults)


def assert_lost(outcomes: list[CallOutcome], rank: int) -> None:
    del outcomes[rank]
    print_report(outcomes[0].text)
    assert_one_report(outcomes)
    assert outcomes[0].where == (rank, None, None, None, "lost")
    assert f"failed: rank {rank} has ended\n  its process (pid" in outcomes[0].text
    assert re.search(rf"rank {rank} +has ended\n", outcomes[0].text)


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


def test_the_death_of_the_rank_with_the_store_is_reported(failing_pool: Pool) -> None:
    assert_lost(failing_pool.run(die, "1f1b", 4, (Fault(0, "0F2", "kill", 0.5),), lost=(0,)), 0)


# --- too slow ------------------------------------------------------------------------------------


def sleep_too_long(fault: Fault) -> CallOutcome:
    with faulty_pipeline("1f1b", 4, timeout=2) as one:
        outcome = one.run_with_faults(fault)
        one.assert_correct()
    return outcome


@pytest.mark.parametrize("fault", [Fault(1, "1F1", "nap", 4)], ids=str)
def test_a_rank_that_takes_too_long_is_shown_computing_and_the_others_waiting(
    failing_pool: Pool, fault: Fault
) -> None:
    outcomes = failing_pool.run(sleep_too_long, fault)
    assert_timed_out(outcomes)
    rows = [line for line in outcomes[0].text.splitlines() if line.startswith("    rank ")]
    for rank, row in enumerate(rows):
        assert ("waits for" in row and "from rank" in row) == (rank != fault.rank)
    assert f"[{fault.action}]" in rows[fault.rank]
    assert f"  the cause is rank {fault.rank}, which is computing, in {fault.action}\n" in outcomes[0].text
    assert outcomes[0].where == (fault.rank, fault.action, 1, 1, "timeout")
    for each in outcomes:
        assert each.seconds < (6 if each.rank == fault.rank else 4) * slowness(), each


def refuse_tokens() -> CallOutcome:
    def count(target: Tensor) -> int:
        if broken:
            raise LookupError("no such token")
        return len(target)

    broken = False
    with faulty_pipeline("1f1b", 4, tokens=count) as one:
        broken = True
        outcome = one.run_with_faults(Fault(-1, ""))
        broken = False
        one.assert_correct()
    return outcome


def test_an_error_before_the_first_action_of_a_rank_is_reported_by_all(failing_pool: Pool) -> None:
    outcomes = failing_pool.run(refuse_tokens)
    print_report(outcomes[0].text)
    assert_one_report(outcomes)
    assert outcomes[0].where == (3, None, None, None, "exception")
    assert "LookupError: no such token" in outcomes[0].text


def join_late() -> CallOutcome | None:
    with faulty_pipeline("1f1b", 4, timeout=2) as one:
        dist.barrier()
        outcome = None if dist.get_rank() == 3 else attempt(one.step)
        dist.barrier()
        return attempt(one.step) if outcome is None else outcome


def test_a_step_without_one_rank_times_out_and_that_rank_raises_when_it_joins(
    failing_pool: Pool,
) -> None:
    outcomes = failing_pool.run(join_late)
    assert_timed_out(outcomes)
    assert re.search("rank 3 +runs neither step nor eval", outcomes[0].text)
    assert "  the cause is rank 3, which runs neither step nor eval, after step 0\n" in outcomes[0].text
    assert outcomes[0].where == (3, None, None, None, "timeout")
