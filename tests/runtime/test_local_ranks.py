"""Promise: local ranks return results, report a failure once, and end with the process that started them."""

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


def test_a_function_runs_on_every_rank_of_one_group(ranks: LocalRanks) -> None:
    assert ranks.run(summed, 10) == [21, 21]


def test_processes_are_reused(ranks: LocalRanks) -> None:
    assert ranks.run(os.getpid) == ranks.run(os.getpid)


def test_a_penstock_error_is_raised_unchanged_without_waiting_for_hanging_ranks(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.local_ranks._GRACE", 0.2)
    with pytest.raises(BuildError, match=r"^no such thing$"):
        ranks.run(raise_on_one, 1, BuildError("no such thing"))


def test_any_other_error_is_reported_in_one_line_with_its_rank(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.local_ranks._GRACE", 0.2)
    with pytest.raises(PipelineError, match=r"^raise_on_one\(\) failed on rank 1: ZeroDivisionError: by 0$"):
        ranks.run(raise_on_one, 1, ZeroDivisionError("by 0"))
    assert ranks.run(summed, 0) == [1, 1]


def test_a_dead_process_is_reported_and_the_next_call_restarts(ranks: LocalRanks) -> None:
    assert ranks.results(die) == [Failure("the process ended with exit code 3")] * 2
    assert ranks.run(summed, 0) == [1, 1]


def test_a_result_that_cannot_be_pickled_is_reported(ranks: LocalRanks) -> None:
    with pytest.raises(PipelineError, match="function cannot be pickled"):
        ranks.run(unsendable)


def test_the_number_of_ranks_is_checked() -> None:
    with pytest.raises(PipelineError, match="the number of ranks must be a whole number of at least 1"):
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
@pytest.mark.full
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
