"""Promise: timers in a log of Megatron-LM become costs of each stage, and a prediction of the step."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from penstock import TraceError
from penstock.traces.read.megatron_timers import read_megatron_timers


def block(scale: float, ranks: int = 4) -> str:
    """What is logged for one interval: 2 pipeline ranks of 2 ranks each; the second has a longer forward."""
    timers = {"forward-backward": 150.0, "forward-compute": 40.0, "backward-compute": 80.0}
    lines = ["INFO:megatron.core.timers:times across ranks (ms):"]
    for name, ms in timers.items():
        lines.append(f"  {name}:")
        for rank in range(ranks):
            slower = 20.0 if name == "forward-compute" and rank >= ranks // 2 else 0.0
            lines.append(f"     rank {rank:2d}: {(ms + slower) * scale:.2f}")
    return "\n".join(lines)


LOG = f""" [2026-01-01] iteration 1/3 | elapsed time per iteration (ms): 900.1 |
{block(3.0)}
 [2026-01-01] iteration 2/3 | elapsed time per iteration (ms): 160.1 |
{block(1.0)}
(min, max) time across ranks (ms):
    forward-compute ................: (1.00, 2.00)
{block(1.0)}
done
"""


def test_means_of_all_but_the_first_interval_become_costs() -> None:
    timers = read_megatron_timers(io.StringIO(LOG), ranks=2, microbatches=4)
    assert timers.steps == 2
    assert timers.step_seconds == pytest.approx(0.15)
    assert timers.costs.forward == pytest.approx((0.01, 0.015))
    assert timers.costs.backward == pytest.approx((0.02, 0.02))
    assert timers.idle == pytest.approx((0.03, 0.01))
    assert timers.predicted.makespan == pytest.approx(0.17)  # 0F0, 4 (F + B) on rank 1, 0B3
    assert timers.schedule.name == "1f1b"


def test_chunks_of_a_rank_share_its_time(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    timers = read_megatron_timers(path, ranks=2, microbatches=4, stages_per_rank=2)
    assert timers.schedule.name == "interleaved-1f1b"
    assert timers.costs.forward == pytest.approx((0.005, 0.0075, 0.005, 0.0075))


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("nothing here\n", ["neither a JSON trace nor a log with 'times across ranks (ms):'"]),
        (LOG.replace("backward-compute", "optimizer"), ["no timer backward-compute"]),
        (LOG.replace(": 40.00", ": fast").replace(": 60.00", ": nan"), ["line 26: not a number", "nan"]),
    ],
)
def test_what_is_missing_is_said_all_at_once(text: str, problems: list[str]) -> None:
    with pytest.raises(TraceError) as error:
        read_megatron_timers(io.StringIO(text), ranks=2, microbatches=4)
    assert all(problem in str(error.value) for problem in problems)


def test_ranks_that_do_not_divide_the_job_are_refused() -> None:
    with pytest.raises(TraceError, match="4 ranks in the log cannot be pipelines with ranks=3"):
        read_megatron_timers(io.StringIO(LOG), ranks=3, microbatches=4)
