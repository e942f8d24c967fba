"""Promise: if a host or its link fails, all ranks name the ranks that are lost, in time, and none hangs.

The hosts are network namespaces of this machine. A cut link gives no sign, as a cable that is pulled.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.traces.diagnose.diagnosis import diagnose, read_evidence
from tests.support.call_outcomes import SOON, CallOutcome, assert_one_report, attempt, print_report
from tests.support.grids import small
from tests.support.host_ranks import HostRanks, join, launch_environment
from tests.support.host_training import LARGE, SMALL, TRAININGS, Cut, Training, steps_of, train
from tests.support.hosts import Hosts
from tests.support.slowness import slowness

TIMEOUT = 4.0
OTHERS = {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}
"""The ranks of the other host."""


def assert_all_name_the_other_host(outcomes: list[CallOutcome], seconds: float) -> None:
    """Every rank failed in time, and names the ranks of the other host."""
    cut_at = max(outcome.injected_at for outcome in outcomes)
    for rank, failed in enumerate(outcomes):
        print_report(failed.text)
        assert failed.error in {"StepFailedError", "PipelineError"}
        assert (failed.at - cut_at if cut_at else failed.seconds) < (seconds + SOON) * slowness()
        assert f" on host{int(rank < 2)})" in failed.text
        assert "does not answer" in failed.text
        assert all(f"rank {other}" in failed.text for other in OTHERS[rank])


@pytest.mark.parametrize(("name", "cutting"), list(zip(TRAININGS, itertools.cycle([1, 2]))))
@small(lambda name: name == "large messages")
def test_a_cut_link_ends_the_step_of_all_ranks(
    host_ranks: HostRanks, tmp_path: Path, name: str, cutting: int
) -> None:
    training = replace(TRAININGS[name], timeout=TIMEOUT, state_dir=str(tmp_path))
    results = host_ranks.run(train, training, Cut(host_ranks.hosts, 1, cutting))
    assert [[outcome.error for outcome in outcomes[:-1]] for outcomes in results] == [[""]] * 4
    failed = [outcomes[-1] for outcomes in results]
    assert_all_name_the_other_host(failed, TIMEOUT)
    assert {outcome.where[-1] for outcome in failed} == {"timeout"}
    for pipeline in read_evidence(tmp_path, None).pipelines:
        culprit = diagnose(pipeline).culprit
        assert culprit is not None
        if training.mesh[0] == "pp":  # otherwise a pipeline is on one host
            assert culprit.kind == "network"
            assert culprit.ranks == tuple(range(len(pipeline.members)))


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
@small(lambda sizes: sizes == LARGE)
def test_training_goes_on_if_a_link_is_restored_in_time(host_ranks: HostRanks, sizes: tuple[int, int]) -> None:
    cut = Cut(host_ranks.hosts, 1, 2, seconds=2.0)
    for outcomes in host_ranks.run(train, Training(sizes, timeout=60), cut):
        assert [outcome.error for outcome in outcomes] == [""] * 3


def cut_between_steps(hosts: Hosts) -> None:
    """All ranks call it, and know that the link of the second host is cut."""
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(0.5)  # the others leave the barrier
        hosts.cut(1)
    time.sleep(1)


def steps_around_a_cut(hosts: Hosts) -> list[CallOutcome]:
    join()
    with steps_of(timeout=TIMEOUT) as step:
        step()
        cut_between_steps(hosts)
        outcomes = [attempt(step)]
        if dist.get_rank() == 2:
            hosts.restore(1)
        time.sleep(min(4 * slowness(), 12))  # the other host has failed too, and its heartbeats arrive again
        return [*outcomes, attempt(step), attempt(step)]


@pytest.mark.full
def test_the_pipeline_connects_again_after_a_link_is_restored(host_ranks: HostRanks) -> None:
    for outcomes in host_ranks.run(steps_around_a_cut, host_ranks.hosts):
        assert [outcome.error for outcome in outcomes] == ["StepFailedError", "", ""], outcomes


def connect_over_a_cut_link(hosts: Hosts) -> CallOutcome:
    join()
    with steps_of(timeout=TIMEOUT) as step, ExitStack() as stack:
        step()
        cut_between_steps(hosts)
        return attempt(lambda: stack.enter_context(steps_of(timeout=TIMEOUT)))


@pytest.mark.full
def test_a_pipeline_is_not_created_over_a_cut_link(host_ranks: HostRanks) -> None:
    outcomes = host_ranks.run(connect_over_a_cut_link, host_ranks.hosts)
    assert_all_name_the_other_host(outcomes, TIMEOUT)


def step_until_the_network_gives_up(hosts: Hosts) -> CallOutcome:
    join()
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text("3", encoding="ascii")  # seconds instead of minutes
    with steps_of(timeout=600) as step:
        step()
        cut_between_steps(hosts)
        outcome = attempt(step)
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text("15", encoding="ascii")
    return outcome


@pytest.mark.full
def test_a_connection_that_the_network_gives_up_is_not_the_end_of_a_process(host_ranks: HostRanks) -> None:
    outcomes = host_ranks.run(step_until_the_network_gives_up, host_ranks.hosts)
    assert_all_name_the_other_host(outcomes, 30)
    for outcome in outcomes:
        assert "the connection to its process (pid" in outcome.text
        assert "its host or the network fails" in outcome.text
        assert "ended" not in outcome.text


def send_more_than_the_network_takes(hosts: Hosts) -> tuple[CallOutcome, float, list[str]]:
    """More short messages than the buffers of a connection hold; what is left after close()."""
    join()
    with steps_of(256, (15, 1024), schedule="gpipe", timeout=TIMEOUT) as step:
        dist.barrier()
        if dist.get_rank() == 1:
            threading.Timer(0.5, hosts.cut, [1]).start()
        outcome = attempt(step)
        begin = time.monotonic()
    return outcome, time.monotonic() - begin, [thread.name for thread in threading.enumerate()]


@pytest.mark.full
def test_sends_on_a_cut_link_end_with_the_step(host_ranks: HostRanks) -> None:
    results = host_ranks.run(send_more_than_the_network_takes, host_ranks.hosts)
    assert_all_name_the_other_host([outcome for outcome, *_ in results], TIMEOUT + 1)
    for _, seconds, threads in results:
        assert seconds < SOON * slowness()
        assert "penstock-send" not in threads


# --- the end of processes --------------------------------------------------------------------------


def train_until_the_other_host_dies() -> CallOutcome:
    join()
    with steps_of(timeout=600) as step:
        step()
        pids: list[Any] = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(0.5)  # the others leave the barrier
            for pid in pids[:1:-1]:
                os.kill(pid, signal.SIGKILL)
        return attempt(step)


def test_the_processes_of_a_host_that_are_killed_at_once_are_named(host_ranks: HostRanks) -> None:
    outcomes = host_ranks.run(train_until_the_other_host_dies, lost=(2, 3))
    assert_one_report(outcomes)
    print_report(outcomes[0].text)
    assert outcomes[0].where[-1] == "lost"
    for rank in (2, 3):
        assert f"    rank {rank}   has ended" in outcomes[0].text
    assert " on host1) ended without a message: killed, or crashed" in outcomes[0].text


SCRIPT = """
import sys, time
import torch.distributed as dist
from tests.support.host_ranks import join
from tests.support.host_training import steps_of
from tests.support.hosts import Hosts

join()
with steps_of(timeout=4) as step:
    step()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other leaves the barrier
        Hosts(sys.argv[1], ()).cut(1)
    time.sleep(1)
    print("cut", time.time(), flush=True)
    step()
"""


@pytest.mark.full
def test_processes_exit_after_a_link_is_cut(two_hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, two_hosts.switch]
    started = [
        host.start(command, launch_environment(two_hosts, host.number, 1, 29512), tmp_path)
        for host in two_hosts.all
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    ended = time.time()
    two_hosts.restore(1)
    for rank, (output, process) in enumerate(zip(outputs, started)):
        assert f"[rank{rank}]: step 2 failed: rank {1 - rank} does not answer" in output
        assert process.returncode == 1
        cut_at = next(float(line.split()[1]) for line in output.splitlines() if line.startswith("cut "))
        assert ended - cut_at < (TIMEOUT + 2 * SOON) * slowness()
