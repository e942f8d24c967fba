"""Promise: local ranks give what functions give, tell a failure once, and never outlive who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.errors import BuildError, PipelineError
from penstock.runtime.local_ranks import Failure, LocalRanks

pytestmark = pytest.mark.xdist_group("ranks-2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2) as started:
        yield started


def summed(number: int) -> int:
    found = torch.tensor(number + dist.get_rank())
    dist.all_reduce(found)
    return int(found)


def raise_on_one(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error
    time.sleep(60)


def die() -> None:
    os._exit(3)


def unsendable() -> object:
    return lambda: None


def test_a_function_runs_on_every_rank_and_ranks_reach_each_other(ranks: LocalRanks) -> None:
    assert ranks.run(summed, 10) == [21, 21]


def test_processes_are_used_again(ranks: LocalRanks) -> None:
    assert ranks.run(os.getpid) == ranks.run(os.getpid)


def test_an_error_of_ours_is_raised_as_it_is_and_does_not_wait_for_ranks_that_hang(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.local_ranks._GRACE", 0.2)
    with pytest.raises(BuildError, match=r"^no such thing$"):
        ranks.run(raise_on_one, 1, BuildError("no such thing"))


def test_any_other_error_is_told_in_one_line_with_its_rank(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.local_ranks._GRACE", 0.2)
    with pytest.raises(PipelineError, match=r"^raise_on_one\(\) failed on rank 1: ZeroDivisionError: by 0$"):
        ranks.run(raise_on_one, 1, ZeroDivisionError("by 0"))
    assert ranks.run(summed, 0) == [1, 1]


def test_a_process_that_dies_is_told_and_the_next_call_starts_anew(ranks: LocalRanks) -> None:
    assert ranks.answers(die) == [Failure("the process ended with exit code 3")] * 2
    assert ranks.run(summed, 0) == [1, 1]


def test_what_cannot_be_sent_back_is_told(ranks: LocalRanks) -> None:
    with pytest.raises(PipelineError, match="function cannot be sent back"):
        ranks.run(unsendable)


def test_numbers_of_ranks_are_checked() -> None:
    with pytest.raises(PipelineError, match="ranks are a whole number of at least 1"):
        LocalRanks(0)


# --- ends ------------------------------------------------------------------------------------------

SLEEPS = """
import os, time
from penstock.runtime.local_ranks import LocalRanks

def sleep(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(100)

if __name__ == "__main__":
    import sys
    with LocalRanks(2) as ranks:
        ranks.run(sleep, sys.argv[1])
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(by: signal.Signals, tmp_path: Path) -> None:
    script, pids = tmp_path / "sleeps.py", tmp_path / "pids"
    script.write_text(SLEEPS)
    pids.mkdir()
    started = subprocess.Popen(  # noqa: S603 -- our own script
        [sys.executable, str(script), str(pids)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _until(lambda: len(list(pids.iterdir())) == 2)
        os.killpg(started.pid, by) if by is signal.SIGINT else started.kill()  # Ctrl-C is for the whole group
    except AssertionError:
        started.kill()
        raise
    finally:
        _, said = started.communicate(timeout=300)
    _until(lambda: not any(_lives(int(pid.name)) for pid in pids.iterdir()))
    assert said.count("Traceback") == (1 if by is signal.SIGINT else 0)  # that of the script itself


def _until(come: object) -> None:
    end = time.monotonic() + 300
    while not come():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
