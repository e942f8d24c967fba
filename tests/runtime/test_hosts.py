"""Promise: pipelines over several hosts train as one process does, and `doctor` names a wrong interface.

The hosts are network namespaces of this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.doctor import DistributedReport, distributed_checks
from tests.support.call_outcomes import CallOutcome
from tests.support.host_ranks import HostRanks, join
from tests.support.host_training import LARGE, TRAININGS, Training, train
from tests.support.hosts import Hosts, hosts_on_this_machine

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def loopback_hosts(two_hosts: Hosts) -> Iterator[Hosts]:  # which skips where hosts are not possible
    """Hosts whose own names are loopback addresses."""
    with hosts_on_this_machine(len(two_hosts.all), loopback_names=True) as hosts:
        yield hosts


def train_all(trainings: list[Training]) -> list[CallOutcome]:
    return [outcome for training in trainings for outcome in train(training)]


def test_gradients_are_those_of_one_process(host_ranks: HostRanks) -> None:
    results = host_ranks.run(train_all, list(TRAININGS.values()))
    assert {outcome.error for outcomes in results for outcome in outcomes} == {""}, results
    losses = [[outcome.loss for outcome in outcomes] for outcomes in results]
    assert len(losses[0]) == 3 * len(TRAININGS)
    assert losses == [losses[0]] * 4


def train_without_an_interface() -> list[CallOutcome]:
    join()
    del os.environ["GLOO_SOCKET_IFNAME"]  # torch's world group needs it, if it is one of gloo
    return train(Training(LARGE))


def test_a_pipeline_needs_no_interface_where_the_names_of_hosts_are_loopback_addresses(
    loopback_hosts: Hosts,
) -> None:
    with HostRanks(loopback_hosts, 1) as ranks:
        for outcomes in ranks.run(train_without_an_interface):
            assert [outcome.error for outcome in outcomes] == [""] * 3


@pytest.mark.full
def test_training_under_torchrun(two_hosts: Hosts) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", two_hosts.all[0].name, "--master-port", "29511"]
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    launched = [
        host.start([*command, "--node-rank", f"{host.number}", "examples/train.py"], environment, REPOSITORY)
        for host in two_hosts.all
    ]
    outputs = [finished(process) for process in launched]
    assert outputs[0][0].count("gradients equal to one process: True") == 3, outputs
    assert [code for _, code in outputs] == [0, 0], outputs


def finished(process: subprocess.Popen[str]) -> tuple[str, int]:
    """The output and the exit code of a process, which is ended if it takes too long."""
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
    return output, process.returncode


# --- penstock doctor -------------------------------------------------------------------------------


def checked() -> DistributedReport:
    return distributed_checks(None, 60)


def test_doctor_measures_the_links_between_hosts(host_ranks: HostRanks) -> None:
    report, *_ = host_ranks.run(checked)
    assert {check.verdict for check in report.checks} <= {"ok", "warn"}, report
    found = {check.name: check.message for check in report.checks}
    assert found["launch"].startswith("4 processes on 2 nodes, which meet at 10.77.0.1:")
    assert found["addresses"] == "gloo listens on 10.77.0.1 (host0), 10.77.0.2 (host1)"
    assert found["edge 0"].startswith("rank 0 to 1, on host0: ")
    assert found["edge 1"].startswith("rank 1 to 2, host0 to host1: ")


UNREACHED = "gloo listens on {0} on host0, {0} on host1, where other hosts do not reach it ({1}): {2}"
ADVICE = "set GLOO_SOCKET_IFNAME=eth0"


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("", UNREACHED.format("127.0.1.1", "a host's own name resolves to it", ADVICE)),
        ("lo", UNREACHED.format("127.0.0.1", "GLOO_SOCKET_IFNAME is lo", ADVICE)),
        ("eth7", f"GLOO_SOCKET_IFNAME is eth7, but host0 has lo, eth0: {ADVICE}"),
    ],
)
def test_doctor_names_an_interface_that_other_hosts_do_not_reach(
    loopback_hosts: Hosts, interface: str, message: str
) -> None:
    environment = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with HostRanks(loopback_hosts, 1, environment) as ranks:
        launch, addresses = ranks.run(checked)[0].checks
    assert launch.verdict == "ok"
    assert (addresses.name, addresses.verdict, addresses.message) == ("addresses", "fail", message)


# --- the hosts themselves --------------------------------------------------------------------------


def test_the_hosts_of_a_run_that_was_killed_are_removed_by_the_next(two_hosts: Hosts) -> None:
    script = "import os; from tests.support import hosts\nwith hosts.hosts_on_this_machine(1): os._exit(9)"
    command = [sys.executable, "-c", script]
    killed = subprocess.Popen(command, cwd=REPOSITORY)  # noqa: S603 -- our own script
    assert killed.wait(60) == 9
    assert namespaces_of(killed.pid)
    with hosts_on_this_machine(1):
        assert not namespaces_of(killed.pid)
    assert len(namespaces_of(os.getpid())) >= len(two_hosts.all)


def namespaces_of(pid: int) -> list[Path]:
    return list(Path("/run/netns").glob(f"penstock-{pid}-*"))
