"""Estimates fitted to one measured schedule predict others: `penstock estimate --fit` on this machine.

    python -m benchmarks.fit [rounds]

The demo's GPT runs on two ranks with one thread each. The costs of zb-h1, as a profile has them, fit the
estimate (`penstock.planning.estimated.fitted_device`). The others are predicted from it, those with four stages
too, which the profile does not have. In each round every schedule runs once, so that load affects all of them;
times are means over the faster half of the rounds. A busy machine needs many rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

import penstock
from benchmarks.processes import on_ranks
from penstock.cost.estimate import Setting, config_of_keys, device, estimate
from penstock.planning.estimated import even_blocks, fitted_device, stage_costs, with_measured_links
from penstock.planning.layout import even_layout
from penstock.runtime import Pipeline, split
from penstock.runtime.demo import gpt as demo
from penstock.simulation.calibration import calibrate
from penstock.simulation.timeline import Timeline

RANKS, MICROBATCHES, MEASURED = 2, 8, "zb-h1"
PREDICTED = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
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


def measured(rounds: int) -> dict[str, list[Timeline]]:
    """The timelines of each schedule, without the first two rounds."""
    found: dict[str, list[Timeline]] = {name: [] for name in (MEASURED, *PREDICTED)}
    batches = demo.Batches(MICROBATCHES)
    with ExitStack() as stack:
        pipelines = {}
        for name in found:
            schedule = penstock.build(name, ranks=RANKS, microbatches=MICROBATCHES)
            stages = split(demo.gpt(), layout=even_layout(demo.LAYERS, schedule.num_stages))
            own = [stages[stage] for stage in schedule.placement.stages_of_rank[dist.get_rank()]]
            pipelines[name] = stack.enter_context(Pipeline(own, schedule, loss=demo.cross_entropy))
            stack.enter_context(pipelines[name].profile())
        for number in range(rounds + 2):
            for name, pipeline in pipelines.items():
                ids, target = batches()
                step = pipeline.step(ids, target=target)
                for parameter in pipeline.parameters():
                    parameter.grad = None
                assert step.timeline is not None
                if number >= 2:
                    found[name].append(step.timeline)
    return found


def compare(rounds: int, print_row: Callable[..., None]) -> None:
    timelines = measured(rounds)
    embedding: Any = demo.gpt()[0]
    config = config_of_keys({**KEYS, "vocab_size": embedding.characters.num_embeddings})
    setting = Setting(sequence=demo.LENGTH, microbatch_size=demo.ROWS, precision="fp32")
    found = estimate(config, setting, device("cpu"))
    typical = calibrate(sorted(timelines[MEASURED], key=lambda step: step.makespan)[: max(1, rounds // 2)])
    fitted = estimate(config, setting, fitted_device(found, typical, even_blocks(found, RANKS)))
    print_row("schedule", "predicted ms", "measured ms", "error %")
    for name, steps in timelines.items():
        schedule = steps[0].schedule
        counts = even_blocks(fitted, schedule.num_stages)
        costs = with_measured_links(stage_costs(fitted, schedule.placement, counts), typical)
        predicted = penstock.simulate(schedule, costs).makespan
        quick = sorted(step.makespan for step in steps)[: max(1, rounds // 2)]
        seconds = statistics.fmean(quick)
        print_row(name, predicted * 1e3, seconds * 1e3, 100 * (predicted / seconds - 1))


if __name__ == "__main__":
    on_ranks(RANKS, compare, int(sys.argv[1]) if sys.argv[1:] else 12)
