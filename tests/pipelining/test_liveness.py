"""Promise: lifetimes and slots of activations are those of torch 2.15, on every torch; valid orders only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

import penstock
from tests.oracles import torch_schedules as oracle
from tests.support.pipelining_orders import NAMES, made, order, ours

analyze: Any = ours.analyze_pipeline_activation_liveness


def fields_of(found: Any) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(found).items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(oracle.RELEASE < (2, 15), reason="torch has it from 2.15 on")
def test_lifetimes_and_slots_are_torchs(name: str) -> None:
    compared = 0
    for ranks, stages_per_rank, m in itertools.product((1, 2, 3), (1, 2, 3), (2, 6)):
        try:
            yours = oracle.built(name, ranks, stages_per_rank, m)
        except ValueError:
            continue
        mine = made(name, ranks, m, stages_per_rank)
        rank = ranks - 1
        stages = [stage for stage, host in mine.stage_index_to_group_rank.items() if host == rank]
        for chosen, granularity in itertools.product((stages, stages[-1:]), ("microbatch", "stage_microbatch")):
            given = {"pp_rank": rank, "stage_indices": chosen, "granularity": granularity}
            wanted = oracle.torch_schedules.analyze_pipeline_activation_liveness(yours, **given)
            assert fields_of(analyze(mine, **given)) == fields_of(wanted)
            assert fields_of(analyze(yours, **given)) == fields_of(wanted)
            compared += 1
    assert compared >= 12


def test_a_slot_is_used_again_after_its_activation_ended() -> None:
    schedule = ours._PipelineScheduleRuntime(made("LoopedBFS", 1, 3, 1)._stages, 3)
    schedule.pipeline_order_with_comms = order("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0B2")
    found = analyze(schedule, pp_rank=0, stage_indices=[0], granularity="stage_microbatch")
    assert [found.slot_for(0, k) for k in range(3)] == [0, 1, 0]
    assert [found.get_activation_lifetime(0, k) for k in range(3)] == [(0, 3), (1, 6), (4, 7)]
    assert found.num_slots == 2
    with pytest.raises(ValueError, match="stage 1, microbatch 0 was not analyzed"):
        found.slot_for(1, 0)
    with pytest.raises(TypeError):
        hash(found)


@pytest.mark.parametrize("row", ["0F0 0W0 0I0", "0I0 0F0 0W0", "0F0 0W0", "0B0 0F0"])
def test_invalid_orders_are_refused_also_those_that_torch_analyzes(row: str) -> None:
    schedule = ours._PipelineScheduleRuntime(made("LoopedBFS", 1, 1, 1)._stages, 1)
    schedule.pipeline_order_with_comms = order(row)
    with pytest.raises(penstock.ScheduleError, match="violation"):
        analyze(schedule, pp_rank=0, stage_indices=[0], granularity="microbatch")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"granularity": "stage"}, "granularity must be microbatch or stage_microbatch"),
        ({"stage_indices": []}, "different stages, at least one"),
        ({"stage_indices": [1, 1]}, "different stages"),
        ({"stage_indices": [0]}, "no forward, or no backward, of 0F0, 0F1"),
        ({"pp_rank": 2}, "no rank 2"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {"pp_rank": 1, "stage_indices": [1, 3], "granularity": "microbatch", **changed}
    with pytest.raises(ValueError, match=message):
        analyze(made("LoopedBFS", 2, 2), **given)
