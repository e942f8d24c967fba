"""Promise: whatever breaks, no rank hangs, reports name the cause, and all ranks train the same batches."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from tests.support.chaos import STEPS, Chaos, Seen, random_chaos, train_with_fault
from tests.support.grids import small
from tests.support.pool import Pool, Pools
from tests.support.slowness import slowness

FAULTS = int(os.environ.get("CHAOS_FAULTS", "300"))
SECONDS = 5
"""Every living rank has reported a failure by then, or so long after the timeout if it is waited for."""


def problems_of(chaos: Chaos, seen: list[Seen], limit: float, injected_at: float) -> list[str]:
    """What is not as promised; every error comes within `limit` seconds."""
    problems = [f"rank {each.rank}: {problem}" for each in seen for problem in each.problems]
    happened = injected_at > 0
    if len({tuple(each.trained) for each in seen}) > 1:
        problems.append(f"trained batches differ: { {each.rank: each.trained for each in seen} }")
    aborted = {each.aborted for each in seen}
    if len(aborted) > 1 or (True in aborted and not chaos.case.replicas * chaos.case.tp > 1):
        problems.append(f"aborted: { {each.rank: each.aborted for each in seen} }")
    if not (chaos.fatal and happened) and aborted == {False}:
        problems += [f"rank {each.rank} trained {each.trained}" for each in seen if len(each.trained) < STEPS]
    expected = happened and chaos.effect != "slow"
    for each in seen:
        if len(each.errors) != int(expected):
            problems.append(f"rank {each.rank} raised {len(each.errors)} errors: {each.errors}")
        for text, at in each.errors:
            problems += [f"rank {each.rank}: {why}\n{text}" for why in _faults_of(chaos, text)]
            if at - injected_at > limit:
                problems.append(f"rank {each.rank} reported after {at - injected_at:.1f} s, not {limit:.1f}")
    return problems


def _faults_of(chaos: Chaos, text: str) -> list[str]:
    """What a report does not say."""
    cause = {
        "raise": "InjectedError: injected at",
        "memory": "allocate",
        "full disk": "No space left on device",
    }.get(chaos.effect, "")
    found = [] if cause in text else [f"the report does not name the cause {cause!r}"]
    if not re.search(rf"rank {chaos.victim}\b", text):
        found.append(f"the report does not name rank {chaos.victim}")
    return found


def problems_with(chaos: Chaos, pool: Pool, folder: Path) -> list[str]:
    """Let one fault happen; the times that are promised hold on a machine that is not busy."""
    before = slowness()
    timeout = min(6 * before, 12.0) if chaos.late else 60.0
    lost = (chaos.victim,) if chaos.fatal else ()
    answers = pool.run(train_with_fault, chaos, str(folder), timeout, seconds=200, lost=lost)
    seen: list[Seen] = [answer for answer in answers if answer is not None]
    injected = folder / "injected"
    injected_at = float(injected.read_text(encoding="utf-8")) if injected.exists() else 0.0
    limit = timeout * chaos.late + SECONDS * max(before, slowness())
    problems = problems_of(chaos, seen, limit, injected_at)
    left = {path.name for path in folder.iterdir()} - {"injected"}
    if any(each.aborted for each in seen):
        pool.stop()
    elif not chaos.fatal and left != ({"saved"} if chaos.saves else set()):
        problems.append(f"files left over: {left}")
    return problems


@pytest.mark.parametrize("group", range(FAULTS // 3))
@small(lambda group: group == 8)
def test_no_fault_hangs_or_desynchronizes_a_job(pools: Pools, tmp_path: Path, group: int) -> None:
    rng = random.Random(group)
    found: list[str] = []
    for number in range(3):
        chaos = random_chaos(rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        found += [f"{chaos}: {problem}" for problem in problems_with(chaos, pools(chaos.ranks), folder)]
    assert not found, "\n".join(found)
