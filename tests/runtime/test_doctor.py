"""Promise: `penstock doctor --distributed` names what is wrong with a launch, and measures clocks and links.

It names a host that others do not reach before gloo connects.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock import Costs, build
from penstock.diagnostics import Check
from penstock.runtime import doctor as ours
from penstock.runtime.doctor import DistributedReport, _Place, check_addresses, check_launch
from tests.support.pool import Pools

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a launch on two nodes."""
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_two_nodes_that_meet_at_a_host_name(launch: pytest.MonkeyPatch) -> None:
    assert check_launch() == Check("launch", "ok", "8 processes on 2 nodes, which meet at node7:29500")
    launch.delenv("GROUP_WORLD_SIZE")
    assert "2 nodes" in check_launch().message


@pytest.mark.parametrize("address", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_local_address_with_several_nodes_is_named(launch: pytest.MonkeyPatch, address: str) -> None:
    launch.setenv("MASTER_ADDR", address)
    found = check_launch()
    assert found.verdict == "fail"
    assert f"MASTER_ADDR is {address}, but there are 2 nodes: each node would wait for itself" in found.message
    launch.setenv("GROUP_WORLD_SIZE", "1")
    assert check_launch().verdict == "ok"


def test_fewer_nodes_than_the_job_of_slurm_has_are_named(launch: pytest.MonkeyPatch) -> None:
    launch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert "the SLURM job has 4 nodes" in check_launch().message
    assert check_launch().verdict == "warn"


def test_without_a_launcher_it_says_how_to_start(launch: pytest.MonkeyPatch) -> None:
    launch.delenv("MASTER_PORT")
    launch.delenv("RANK")
    found = check_launch()
    assert found.verdict == "fail"
    assert found.message.startswith("RANK, MASTER_PORT not set: run it under a launcher, e.g. torchrun")


def measured(family: str, ranks: int) -> tuple[DistributedReport, Check]:
    schedule = build(family, ranks=ranks, microbatches=2)
    hosts = [f"node{rank // 2}" for rank in range(dist.get_world_size())]
    limit = timedelta(seconds=120)
    return ours._measured([], schedule, torch.device("cpu"), hosts, limit), ours._world_size(schedule)


def test_every_edge_between_ranks_is_measured_and_given_as_costs(pools: Pools) -> None:
    report, size = pools(4).run(measured, "zbv", 4)[0]
    assert size == Check("world size", "ok", "4: one pipeline of 4 ranks")
    clocks, *edges = report.checks
    assert clocks.name == "clocks"
    assert clocks.verdict == "ok"
    assert [check.name for check in edges] == [
        f"edge {edge}" for edge in (0, 1, 2, 4, 5, 6)
    ]  # 3 is on one rank
    assert edges[1].message.startswith("rank 1 to 2, node0 to node1: ")
    report.costs.check_lengths(build("zbv", ranks=4, microbatches=2).graph, 4)
    assert min(report.costs.bandwidth) > 0


def test_several_pipelines_side_by_side_are_measured(pools: Pools) -> None:
    report, size = pools(4).run(measured, "1f1b", 2)[0]
    assert size.message == "4: 2 pipelines, side by side in a mesh of 2 ranks"
    assert [check.message.split(":")[0] for check in report.checks[1:]] == [
        "rank 0 to 2, node0 to node1",
        "rank 1 to 3, node0 to node1",
    ]


def world_size_of(ranks: int) -> Check:
    return ours._world_size(build("1f1b", ranks=ranks, microbatches=2))


def test_a_world_that_does_not_fit_the_schedule_is_named(pools: Pools) -> None:
    found = pools(4).run(world_size_of, 3)[0]
    assert found.verdict == "fail"
    assert found.message == "4 processes, but 1f1b has 3 ranks: start 3 processes, or a multiple of that"


def test_an_edge_that_is_much_slower_than_the_others_is_a_warning() -> None:
    measured = np.array([[10_000, 100_000], [10_000, 1_000_000], [1_000_000, 100_000]])
    assert [check.verdict for check in ours._link_checks([measured], lambda *_: "here")] == [
        "ok",
        "warn",
        "warn",
    ]


def test_clocks_that_are_far_apart_are_a_warning() -> None:
    assert ours._clock_check([0.0, -2.0, 0.1]).verdict == "warn"
    assert "2e+03 ms apart (rank 1 and rank 0)" in ours._clock_check([0.0, -2.0, 0.1]).message


@pytest.mark.full
def test_under_torchrun_only_rank_0_prints_and_the_links_are_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "penstock", "doctor", "--distributed", "--schedule", "1f1b", "-p", "2", "-m", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    answer = subprocess.run(  # noqa: S603 -- our own command
        [*command, "-o", "links.toml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    lines = answer.stdout.splitlines()
    assert [line.split()[1] for line in lines[:7]] == [
        "launch",
        "addresses",
        "rendezvous",
        "versions",
        "world",
        "clocks",
        "edge",
    ]
    assert len(lines) == 9
    costs = Costs.read(tmp_path / "links.toml")
    assert lines[7] == f"latency_seconds = {costs.to_keys()['latency_seconds']}"


# --- addresses -------------------------------------------------------------------------------------


LIMIT = timedelta(seconds=60)


def checked(ranks: int) -> list[Check]:
    """What ranks of this host find."""
    store = HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: check_addresses(store, rank, ranks, LIMIT), range(ranks)))


def test_ranks_of_one_host_may_listen_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    message = f"gloo listens on 127.0.0.1 ({socket.gethostname()})"
    assert checked(3) == [Check("addresses", "ok", message)] * 3


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    for found in checked(2):
        assert found.verdict == "fail"
        assert found.message.startswith(f"GLOO_SOCKET_IFNAME is none7, but {socket.gethostname()} has lo")
        assert found.message.endswith(": set GLOO_SOCKET_IFNAME")


def test_a_host_that_listens_on_the_loopback_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    places = [
        _Place("node0", "10.0.0.1", 1, "", "set GLOO_SOCKET_IFNAME=eth0"),
        _Place("node1", "127.0.1.1", 1, "", "set GLOO_SOCKET_IFNAME=eth1"),
        _Place("node2", "127.0.0.1", 1, "", "set GLOO_SOCKET_IFNAME=eth2"),
    ]
    assert ours._problem(places[:1]) == ""
    assert ours._problem(places[:2]) == (
        "gloo listens on 127.0.1.1 on node1, where other hosts do not reach it (a host's own name resolves to "
        "it): set GLOO_SOCKET_IFNAME=eth1"
    )
    assert ours._problem(places).endswith(
        ": on node1 set GLOO_SOCKET_IFNAME=eth1; on node2 set GLOO_SOCKET_IFNAME=eth2"
    )


def test_a_host_that_does_not_accept_connections_is_named() -> None:
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        here, there = ("node0", "127.0.0.1", 1, "", ""), ("node1", *bound.getsockname(), "", "")
        places = [_Place(*here), _Place(*there)]
        assert ours._unreached(places, 0) == (
            "rank 0 on node0 does not reach rank 1 at 127.0.0.1 on node1 (Connection refused): check the "
            "interface (GLOO_SOCKET_IFNAME) and the firewall"
        )
        assert ours._unreached(places[:1], 0) == ""
