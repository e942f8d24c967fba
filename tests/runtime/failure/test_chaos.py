"""Promise: whatever breaks, no rank hangs, reports name the cause, and all ranks train the same batches."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import STEPS, Chaos, Seen, random_chaos, train_with_fault
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.slowness import slowness

SECONDS = 5
"""Within the timeout and this, every living rank has reported a failure."""


def problems_of(chaos: Chaos, seen: list[Seen], timeout: float, injected_at: float) -> list[str]:
    """What is not as promised."""
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
            if at - injected_at > timeout + SECONDS * slowness():
                problems.append(f"rank {each.rank} reported after {at - injected_at:.1f} s")
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


@pytest.mark.parametrize("group", range(34))
@small(lambda group: group == 0)
def test_no_fault_hangs_or_desynchronizes_a_job(pools: Pools, tmp_path: Path, group: int) -> None:
    rng = random.Random(group)
    found: list[Any] = []
    for number in range(3):
        chaos = random_chaos(rng)
        timeout = min(8 * slowness(), 16.0)
        folder = tmp_path / str(number)
        folder.mkdir()
        lost = (chaos.victim,) if chaos.fatal else ()
        answers = pools(chaos.ranks).run(
            train_with_fault, chaos, str(folder), timeout, seconds=10 * timeout, lost=lost
        )
        if any(answer is not None and answer.aborted for answer in answers):
            pools(chaos.ranks).stop()
        injected = folder / "injected"
        injected_at = float(injected.read_text(encoding="utf-8")) if injected.exists() else 0.0
        seen = [answer for answer in answers if answer is not None]
        found += [f"{chaos}: {problem}" for problem in problems_of(chaos, seen, timeout, injected_at)]
        left = {path.name for path in folder.iterdir() if not path.name.startswith(("done", "injected"))}
        if not chaos.fatal and not any(each.aborted for each in seen) and left != {"saved"}:
            found.append(f"{chaos}: files left over: {left}")
    assert not found, "\n".join(found)
