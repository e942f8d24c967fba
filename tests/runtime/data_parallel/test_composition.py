"""Promises of composition: inside data and tensor parallelism a pipeline trains as one process does."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import torch
from benchmarks.composition import GATHER, REDUCE, counted
from torch.distributed.fsdp import MixedPrecisionPolicy

from penstock import Costs, Kind, Schedule, build, lower
from penstock.lowering import AddCommunication, Offload, Recompute, SplitBackward
from penstock.search import PlaceSharding
from tests.support.composed_model import Composed, batch_of
from tests.support.composition import gradients, pipeline_of, replica_index, train_composed
from tests.support.grids import small, thinned
from tests.support.pool import Pools
from tests.support.reference import problems_of, run_cases

FAMILIES = ("1f1b", "interleaved-1f1b", "looped-bfs", "zbv", "dualpipev")


def schedules(family: str) -> list[Schedule]:
    """With a whole backward, where the family has one, and with a split one."""
    schedule = build(family, ranks=2, microbatches=4)
    split = SplitBackward()(schedule)
    return [schedule] if split == schedule else [schedule, split.renamed(f"{family} split")]


def problems(pools: Pools, ranks: int, cases: list[Composed]) -> str:
    return problems_of(cases, pools(ranks).run(run_cases, cases, train_composed, seconds=600))


@pytest.mark.parametrize(
    ("data", "family"), [*(("fsdp", family) for family in FAMILIES), ("replicas", "1f1b"), ("replicas", "zbv")]
)
@small(lambda data, family: (data, family) == ("fsdp", "1f1b"))
def test_replicated_stages_train_as_one_process(pools: Pools, data: str, family: str) -> None:
    cases = []
    for place, schedule in enumerate(schedules(family)):
        cases += [
            Composed(schedule, data, 2, tied=True, tokens=place == 0, checkpointed=place == 1),
            Composed(schedule, data, 2, accumulated=2, checkpointed=place == 0, tokens=place == 1),
        ]
    assert not problems(pools, 4, thinned(cases, 3))


@pytest.mark.parametrize("data", ["ddp", "replicate", "replicate-fsdp"])
@small(lambda data: data == "ddp")
def test_every_wrapper_of_torch_reduces_once(pools: Pools, data: str) -> None:
    cases = [Composed(build("1f1b", ranks=2, microbatches=4), data, 2, tied=True, tokens=True)]
    cases += [
        Composed(build(family, ranks=2, microbatches=4), data, 2, tied=True, accumulated=together)
        for family, together in (("zbv", 1), ("interleaved-1f1b", 2))
    ]
    assert not problems(pools, 4, thinned(cases, 2))


@pytest.mark.parametrize("family", ["1f1b", "looped-bfs", "zbv"])
@small(lambda family: family == "1f1b")
def test_stages_in_tensor_parallel_train_as_one_process(pools: Pools, family: str) -> None:
    cases = [
        Composed(schedule, tp=2, tied=place == 0, accumulated=2 - place, checkpointed=place == 1)
        for place, schedule in enumerate(schedules(family))
    ]
    assert not problems(pools, 4, thinned(cases, 2))


@pytest.mark.parametrize(
    ("data", "split"), [("fsdp", True), ("fsdp", False), ("replicas", True), ("ddp", False), ("tp", True)]
)
@small(lambda data, split: data == "fsdp" and split)
def test_recomputed_and_offloaded_stages_train_as_one_process(pools: Pools, data: str, *, split: bool) -> None:
    plain, halves = schedules("1f1b")
    options: dict[str, Any] = {"tp": 2} if data == "tp" else {"data": data, "replicas": 2}
    if split:
        case = Composed(Offload(ahead=0)(Recompute(stages=(0,))(halves)), tied=True, steps=1, **options)
    else:
        case = Composed(Offload(ahead=0)(plain), accumulated=3, checkpointed=True, **options)
    assert not problems(pools, 4, [case])


def cases_on_eight_ranks() -> list[Composed]:
    cases = []
    for place, family in enumerate(("zbv", "1f1b", "looped-bfs")):
        tied, together = place % 2 == 0, 1 + place % 2
        cases += [
            Composed(schedule, "fsdp", 2, 2, tied=tied, accumulated=together)
            for schedule in schedules(family)[: 1 + place % 2]
        ]
    return [
        *cases,
        Composed(build("1f1b", ranks=2, microbatches=2), "hsdp", 4, tied=True, tokens=True, steps=1),
        Composed(build("zbv", ranks=2, microbatches=4), "hsdp", 4, accumulated=2),
        Composed(build("zbv", ranks=2, microbatches=4), "replicas", 2, 2, tied=True),
        Composed(build("1f1b", ranks=4, microbatches=4), "fsdp", 2, tied=True, checkpointed=True),
    ]


@pytest.mark.parametrize("case", cases_on_eight_ranks(), ids=str)
@pytest.mark.full
def test_three_dimensions_train_as_one_process(pools: Pools, case: Composed) -> None:
    assert not problems(pools, 8, [case])


def _collectives(case: Composed) -> tuple[Counter[str], Counter[str]]:
    """What FSDP did in the second step, and what the schedule says."""
    found: Counter[str] = Counter()
    pipeline, mesh = pipeline_of(case)
    groups = Counter({0: 2, case.schedule.num_stages - 1: 2})  # a block, and what is not in a block
    with closing(pipeline):
        x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
        pipeline.step(x, target=y)
        with counted(found):
            pipeline.step(x, target=y)
        promised: Counter[str] = Counter()
        for step in pipeline.schedule.ranks[pipeline.rank]:
            kind, stage = step.parts[0].kind, step.parts[0].stage
            name = {Kind.UNSHARD: GATHER, Kind.REDUCE_GRAD: REDUCE}.get(kind)
            if name is not None:
                promised[name] += groups.get(stage, 1)
    return found, promised


@pytest.mark.parametrize("family", ["1f1b", "looped-bfs", "zbv", "interleaved-1f1b"])
@small(lambda family: family == "zbv")
def test_shards_are_gathered_and_reduced_as_often_as_the_schedule_says(pools: Pools, family: str) -> None:
    case = Composed(build(family, ranks=2, microbatches=4), "fsdp", 2)
    for found, promised in pools(4).run(_collectives, case):
        assert found == promised
        assert found[REDUCE] > 0


def _placed(family: str, stages_per_rank: int, memory_limit: float) -> Schedule:
    costs = Costs(unshard=0.8, reduce_grad=1.5, unsharded_parameters=4)
    passes = (AddCommunication(), PlaceSharding(costs, memory_limit))
    return lower(build(family, ranks=2, microbatches=4, stages_per_rank=stages_per_rank), passes)


@pytest.mark.full
def test_sharding_placed_by_cost_gathers_less_and_trains_as_one_process(pools: Pools) -> None:
    """With room for little more than one stage, reductions come after RESHARD and UNSHARD."""
    tight, wide = (Composed(_placed("interleaved-1f1b", 3, limit), "fsdp", 2) for limit in (12, 17))
    assert "4RESHARD 2UNSHARD 0UNSHARD 4REDUCE_GRAD" in str(tight.schedule)
    fixed = lower(build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=3))
    gathers = [each.table.of_kind(Kind.UNSHARD).sum() for each in (tight.schedule, fixed, wide.schedule)]
    assert gathers == [28, 6, 9]
    for found, promised in pools(4).run(_collectives, tight):
        assert found == promised
    assert not problems(pools, 4, [tight])


def _summed_in_double(schedules: list[Schedule]) -> list[dict[str, Any]]:
    """Gradients that are computed in single precision and summed in double."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    found = []
    for schedule in schedules:
        case = Composed(schedule, "fsdp", 2, policy=policy)
        pipeline, mesh = pipeline_of(case)
        with closing(pipeline):
            x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
            pipeline.step(x, target=y)
            found.append(dict(gradients(pipeline)))
    return found


def test_deferred_weight_gradients_are_reduced_in_the_given_dtype(pools: Pools) -> None:
    m = 6
    apart = [
        " ".join(f"{stage}{kind}{microbatch}" for kind in "FIW" for microbatch in range(m))
        for stage in range(2)
    ]
    schedules = [build("gpipe", ranks=2, microbatches=m), Schedule(apart)]
    for whole, split in pools(4).run(_summed_in_double, schedules):
        assert all(torch.equal(whole[name], split[name]) for name in whole)
        rounded = {name: value.to(torch.float32).to(torch.float64) for name, value in whole.items()}
        assert not all(torch.equal(whole[name], rounded[name]) for name in whole), "doubles were summed"
