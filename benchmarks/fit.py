"""Estimates fitted to one measured schedule predict others: `penstock estimate --fit` on this machine.

    python -m benchmarks.fit [gpt] [sleep] [rounds] [real-time]

One schedule is profiled: 1F1B in which every second microbatch has a split backward, so that B, I and W are
measured. Its costs fit the estimate (`penstock.planning.estimated_model.fitted_device`), and others are
predicted, those with two stages per rank too, which the profile does not have. In each round every schedule
runs once, so that load affects all of them alike; times are those of the fastest quarter of the rounds.
The measured schedule runs twice: what its two times differ by is noise.
Steps of a busy machine vary, and wait for each other: predictions have the jitter of the measured schedule.
`gpt` is the demo's model on two ranks with one thread each, `sleep` the same stages on four ranks with layers
that sleep instead, which need no cores. With `real-time` the ranks come before other processes while they are
measured, which needs the right to do so, and stops what else runs on two cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from benchmarks import modules
from benchmarks.processes import on_ranks
from benchmarks.rounds import half_split, profiled_rounds
from penstock import Schedule
from penstock.cost.estimate import Estimate, ParallelConfig, config_of_keys, device, estimate
from penstock.planning.estimated_model import even_blocks, fitted_device, stage_costs, with_measured_links
from penstock.planning.layout import even_layout
from penstock.runtime import demo, register_layer, split
from penstock.simulation.calibration import KindError, calibrate, errors_by_kind, measured_jitter
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.timeline import Timeline

MICROBATCHES, MEASURED, CONTROL = 8, "half-split 1f1b", "measured again"
PREDICTED = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
SLEEP = 0.010
"""Seconds of F, I and W of a sleeping block."""
KEYS = {
    "model_type": "gpt2",
    "n_embd": demo.WIDTH,
    "n_layer": demo.LAYERS,
    "n_head": demo.HEADS,
    "n_positions": demo.LENGTH,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


class Prediction(NamedTuple):
    """A schedule's step, predicted and measured, and the errors of its actions by kind."""

    name: str
    predicted: float
    """With the jitter of the measured schedule."""
    steady: float
    """The same if all steps took their means."""
    measured: float
    kinds: list[KindError]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def schedules(ranks: int) -> dict[str, Schedule]:
    """The measured schedule, the same again, and those that are predicted."""
    half = half_split("1f1b", ranks, MICROBATCHES)
    others = {name: penstock.build(name, ranks=ranks, microbatches=MICROBATCHES) for name in PREDICTED}
    return {MEASURED: half, **others, CONTROL: half}


def gpt_estimate() -> Estimate:
    """Of the demo's GPT on a CPU that nobody measured."""
    embedding: Any = demo.gpt()[0]
    config = config_of_keys({**KEYS, "vocab_size": embedding.characters.num_embeddings})
    parallel = ParallelConfig(sequence=demo.LENGTH, microbatch_size=demo.ROWS, precision="fp32")
    return estimate(config, parallel, device("cpu"))


# --- measured steps ---------------------------------------------------------------------------------


def gpt_stages(schedule: Schedule) -> Sequence[nn.Module]:
    return list(split(demo.gpt(), layout=even_layout(demo.LAYERS, schedule.num_stages)).values())


def sleeping_stages(schedule: Schedule) -> Sequence[nn.Module]:
    """Layers sleep for as long as estimates are to each other."""
    found = gpt_estimate()
    seconds = [layer.seconds.compute.total for layer in found.layers]
    stages, first = [], 0
    for count in even_blocks(found, schedule.num_stages):
        share = sum(seconds[first : first + count]) / found.by_kind["block"].seconds.compute.total
        stages.append(modules.Sleeping(SLEEP * share))
        first += count
    return stages


def gpt_batches() -> Callable[[], tuple[Tensor, Tensor]]:
    return demo.Batches(MICROBATCHES)


def sleeping_batches() -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(MICROBATCHES, 4, requires_grad=True), torch.randn(MICROBATCHES, 4))


PARTS: dict[str, tuple[int, Any, Any, Any]] = {
    "gpt": (2, gpt_stages, gpt_batches, demo.cross_entropy),
    "sleep": (4, sleeping_stages, sleeping_batches, nn.functional.mse_loss),
}


def measured(part: str, rounds: int) -> dict[str, list[Timeline]]:
    """The timelines of each schedule."""
    ranks, stages_of, batches_of, loss = PARTS[part]
    return profiled_rounds(schedules(ranks), stages_of, batches_of(), loss, rounds)


# --- predictions ------------------------------------------------------------------------------------


def predictions(found: Estimate, timelines: dict[str, list[Timeline]]) -> list[Prediction]:
    """Every schedule predicted from the profile of the first one."""
    typical, jitter = calibrate(_fastest(timelines[MEASURED])), measured_jitter(_fastest(timelines[MEASURED]))
    stages = timelines[MEASURED][0].schedule.num_stages
    fitted = estimate(found.config, found.parallel, fitted_device(found, typical, even_blocks(found, stages)))
    rows = []
    for name, steps in timelines.items():
        schedule = steps[0].schedule
        counts = even_blocks(fitted, schedule.num_stages)
        costs = with_measured_links(stage_costs(fitted, schedule.placement, counts), typical)
        timeline = penstock.simulate(schedule, costs)
        makespan = simulate_with_jitter(schedule, costs, jitter=min(jitter, 1.0)).mean
        seconds = fmean(step.makespan for step in _fastest(steps))
        kinds = errors_by_kind(timeline, _fastest(steps))
        rows.append(Prediction(name, makespan, timeline.makespan, seconds, kinds))
    return rows


def _fastest(steps: Sequence[Timeline]) -> list[Timeline]:
    """The fastest quarter: other processes only add time."""
    return sorted(steps, key=lambda step: step.makespan)[: max(1, len(steps) // 4)]


def compare(part: str, rounds: int, real_time: bool, print_row: Callable[..., None]) -> None:  # noqa: FBT001 -- for spawn
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: sleeps end on time, not up to 50 us later
    register_layer(modules.Sleeping, modules.SleepingRule())
    print_row("schedule", "predicted ms", "measured ms", "error %", "without jitter", "% of F, I, W, B")
    if real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    timelines = measured(part, rounds)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    for row in predictions(gpt_estimate(), timelines):
        kinds = " ".join(f"{each.kind} {100 * each.error:+.0f}" for each in row.kinds[:-1])
        times = (row.predicted * 1e3, row.measured * 1e3, 100 * row.error)
        print_row(row.name, *times, 100 * (row.steady / row.measured - 1), kinds)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:] if each.isdigit()]
    for part in [each for each in sys.argv[1:] if each in PARTS] or PARTS:
        print(f"{part}, {PARTS[part][0]} ranks")
        on_ranks(PARTS[part][0], compare, part, *(given or [12]), "real-time" in sys.argv)
