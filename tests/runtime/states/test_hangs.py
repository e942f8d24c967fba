"""Promise: the states that the ranks of a real hang leave name the culprit, in our runtime and in torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.traces.diagnose.diagnosis import diagnose, read_evidence
from tests.support.grids import small
from tests.support.hangs import CULPRIT, FAULTS, RANKS, RUNTIMES, hang
from tests.support.pool import Pools
from tests.support.slowness import slowness


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("runtime", RUNTIMES)
@small(lambda runtime, fault: (runtime, fault) == ("torch with lists", "skip"))
def test_the_culprit_of_a_hang_is_named(pools: Pools, tmp_path: Path, runtime: str, fault: str) -> None:
    lost = (CULPRIT,) if fault == "stop" else ()
    answers = pools(RANKS).run(hang, runtime, fault, str(tmp_path), 4 * min(slowness(), 3), lost=lost)
    assert all(answer != "no error" for rank, answer in enumerate(answers) if rank not in lost), answers
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    found = diagnose(pipeline)
    assert found.culprit is not None
    assert found.culprit.ranks == (CULPRIT,), found.findings
    assert found.culprit.kind in FAULTS[fault], found.findings
    assert (CULPRIT in found.states) == (fault != "stop")
    for rank, state in found.states.items():
        assert state.runs
        assert state.step_number == (1 if fault == "another schedule" else 2)
        assert rank == CULPRIT or state.awaits or state.waiting_for
