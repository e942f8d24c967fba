"""Promises of execution: any right schedule runs, however it is ordered, and holds what it is said to hold."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing

import pytest
import torch

from penstock import Action, Costs, Kind, Overlap, Placement, Schedule, build, lower, simulate, validate
from penstock.errors import PipelineError
from penstock.ir.action import Step
from penstock.lowering import (
    AddCommunication,
    DeferReceives,
    Pass,
    SplitBackward,
)
from penstock.runtime import Custom, Pipeline
from tests.runtime.execution.test_gradients import FAMILIES, ranks
from tests.support.grids import small
from tests.support.models import TASKS
from tests.support.pool import Pools
from tests.support.random_schedules import _inputs_done
from tests.support.reference import (
    TIMEOUT,
    Case,
    Outcome,
    differences,
    faults_of,
    forward,
    gradients_of,
    run_cases,
    split_plainly,
    train_in_pipeline,
    train_plainly,
)

TASKS_OF_ANY_ORDER = ("mlp", "nested", "transformer", "dropout", "uneven")

# --- random schedules ------------------------------------------------------------------------------


def random_schedule(rng: random.Random, p: int) -> Schedule:
    """Stages thrown onto ranks, microbatches in any order, backwards split or not, some pairs overlapped."""
    hosts = list(range(p)) + [rng.randrange(p) for _ in range(rng.randint(0, 3))]
    rng.shuffle(hosts)
    placement, stages, m = Placement(tuple(hosts)), len(hosts), rng.randint(1, 5)
    waiting = {Action(Kind.F, s, k) for s in range(stages) for k in range(m)}
    share = rng.choice((0, 0.5, 1))
    for s in range(stages):
        for k in range(m):
            kinds = (Kind.I, Kind.W) if rng.random() < share else (Kind.B,)
            waiting |= {Action(kind, s, k) for kind in kinds}
    done: set[Action] = set()
    rows: list[list[Step]] = [[] for _ in range(p)]
    while waiting:
        ready = sorted((a for a in waiting if _inputs_done(a, done, stages)), key=str)
        first = rng.choice(ready)
        rank = hosts[first.stage]
        step: Step = first
        partners = [b for b in ready if b.kind in (Kind.B, Kind.I) and hosts[b.stage] == rank]
        if first.kind is Kind.F and partners and rng.random() < 0.3:
            step = Overlap(first, rng.choice(partners))
        rows[rank].append(step)
        done |= set(step.parts)
        waiting -= set(step.parts)
    return Schedule(rows, placement, m, "random")


def randomly_lowered(rng: random.Random, schedule: Schedule) -> Schedule:
    how = rng.choice(("not", "default", "communication", "deferred", "far deferred", "early", "late"))
    if how == "not":
        return schedule
    if how == "default":
        return lower(schedule)
    passes: list[Pass] = [AddCommunication()]
    if how.endswith("deferred"):
        passes.append(DeferReceives(past_sends=how == "far deferred"))
    schedule = lower(schedule, passes)
    return early(schedule) if how == "early" else late(schedule) if how == "late" else schedule


def early(schedule: Schedule) -> Schedule:
    """All receives in front of everything else."""
    rows = [sorted(row, key=lambda step: not step.kind.is_receive) for row in schedule.ranks]
    return Schedule(rows, schedule.placement, schedule.microbatches, f"{schedule.name} early")


def late(schedule: Schedule) -> Schedule:
    """Each receive right before the step that uses it."""
    uses = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    rows = []
    for row in schedule.ranks:
        receives = {step for step in row if step.kind.is_receive}
        moved: list[Step] = []
        for step in row:
            if step in receives:
                continue
            wanted = [Action(uses[a.kind], a.stage, a.microbatch) for a in step.parts if a.kind in uses]
            moved += [receive for receive in wanted if receive in receives]
            moved.append(step)
        rows.append(moved)
    return Schedule(rows, schedule.placement, schedule.microbatches, f"{schedule.name} late")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p, seed: p == 4 and seed == 0)
def test_random_right_schedules_train_as_one_process(pools: Pools, p: int, seed: int) -> None:
    rng = random.Random(100 * p + seed)
    cases = []
    for place in range(8):
        while True:
            schedule = randomly_lowered(rng, random_schedule(rng, p - 1 if p == 4 and place % 2 else p))
            if not validate(schedule, "edge-streams"):
                break
        task = TASKS_OF_ANY_ORDER[place % len(TASKS_OF_ANY_ORDER)]
        cases.append(Case(schedule, task, dtype=rng.choice((torch.float32, torch.float64)), steps=2))
    assert not faults_of(cases, pools(p).run(run_cases, cases))


# --- orders of communication -----------------------------------------------------------------------


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 2)
def test_receives_may_be_posted_early_or_late(pools: Pools, p: int) -> None:
    cases = []
    for family in ("1f1b", "interleaved-1f1b", "dualpipev"):
        plain = lower(build(family, ranks=p, microbatches=2 * p))
        orders = (early, late, DeferReceives(), DeferReceives(past_sends=True))
        changed = [order(plain) for order in orders]
        cases += [Case(schedule, steps=2) for schedule in changed if not validate(schedule, "edge-streams")]
    assert len(cases) > 9
    assert not faults_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 4)
def test_schedules_that_would_hang_with_waiting_sends_run(pools: Pools, p: int) -> None:
    plain = [lower(build(family, ranks=p, microbatches=m)) for family in FAMILIES for m in (p, 2 * p)]
    changed = [order(schedule) for schedule in plain for order in (late, DeferReceives(past_sends=True))]
    cases = [
        Case(schedule, steps=2)
        for schedule in changed
        if validate(schedule) and not validate(schedule, "edge-streams")
    ][:8]
    assert len(cases) > 3
    assert not faults_of(cases, pools(p).run(run_cases, cases))


def run_forwards_only(case: Case) -> Outcome:
    task, schedule, outcome = TASKS[case.task], case.schedule, Outcome()
    m = schedule.microbatches
    stages = task.stages(schedule.num_stages, case.dtype)
    batch = task.batch(0, m, case.dtype)
    parts = zip(split_plainly(batch.args[0], m), split_plainly(batch.target, m))
    losses = [float(task.loss(forward(stages, (x,), {}), y)) for x, y in parts]
    with closing(Pipeline(dict(enumerate(stages)), schedule, loss=task.loss, timeout=TIMEOUT)) as pipeline:
        for call in (pipeline.step, pipeline.eval, pipeline.step):
            result = call(*batch.args, target=batch.target)
            outcome.losses.append(result.loss)
            if result.losses is None or result.losses.tolist() != losses:
                outcome.faults.append(f"{call.__name__}: {result.losses} is not {losses}")
            if pipeline.step(*batch.args).loss is not None:
                outcome.faults.append("a loss without a target")
        if any(parameter.grad is not None for stage in stages for parameter in stage.parameters()):
            outcome.faults.append("there are gradients")
    return outcome


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 2)
def test_schedules_of_forwards_alone_run_by_step_and_by_eval(pools: Pools, p: int) -> None:
    cases = [
        Case(build("forward-only", ranks=p, microbatches=m, stages_per_rank=v), task)
        for m, v, task in ((1, 1, "mlp"), (5, 2, "transformer"), (8, 3, "mlp"))
    ]
    cases.append(Case(lower(cases[1].schedule), "transformer"))
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_forwards_only))


# --- functions in place of actions -----------------------------------------------------------------

COUNTED = ("F", "I", "W", "B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B")


def run_with_functions(case: Case) -> Outcome:
    """Functions for all kinds that count themselves; overlapped pairs run their backward first."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    wanted = train_plainly(
        case.task, case.optimizer, case.dtype, 1, case.schedule.num_stages, case.schedule.microbatches
    )

    def count(custom: Custom) -> None:
        counts[str(custom.action)] += 1
        if custom.action.kind is Kind.REDUCE_GRAD:
            stage = custom.action.parts[0].stage
            got = gradients_of(custom.stages[stage].module)
            faults.extend(differences("when reduced", got, wanted.gradients[0][stage], exact=False))
        custom.run()

    def swap(custom: Custom) -> None:
        counts[str(custom.action)] += 1
        if [part.action for part in custom.parts] != list(custom.action.parts):
            faults.append(f"{custom.action} has the parts {custom.parts}")
        for part in reversed(custom.parts):
            part.run()

    outcome = train_in_pipeline(case, {**dict.fromkeys(COUNTED[:-1], count), "OVERLAP_F_B": swap})
    rank = torch.distributed.get_rank()
    right: Counter[str] = Counter()
    for step in (
        lower(case.schedule).ranks[rank] if case.schedule.level == "compute" else case.schedule.ranks[rank]
    ):
        if not step.kind.is_communication:
            right.update({str(step), *map(str, step.parts)})
    if counts != right:
        outcome.faults.append(f"called {counts - right} too often and {right - counts} too seldom")
    outcome.faults += faults
    return outcome


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 4)
def test_functions_take_the_place_of_every_kind_of_action_inside_overlaps_too(pools: Pools, p: int) -> None:
    built = [build(family, ranks=p, microbatches=2 * p) for family in ("dualpipev", "zbv", "1f1b", "zb-h1")]
    built += [lower(SplitBackward()(built[0])), random_schedule(random.Random(p), p)]
    cases = [Case(schedule, steps=1) for schedule in built]
    assert any(isinstance(step, Overlap) for step in built[0].ranks[0])
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_with_functions))


def run_one_function(case: tuple[str, Schedule]) -> Outcome:
    kind, schedule = case
    called = []

    def function(custom: Custom) -> None:
        called.append(custom.action)
        custom.run()

    outcome = train_in_pipeline(Case(schedule, steps=1), {kind: function})
    if not called:
        outcome.faults.append("not called")
    return outcome


@pytest.mark.xdist_group("ranks-2")
def test_a_function_for_one_kind_alone_is_called(pools: Pools) -> None:
    cases = [(kind, build("dualpipev", ranks=2, microbatches=5)) for kind in COUNTED]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_one_function))


def refused_functions() -> list[str]:
    told = []
    for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "G"):
        with pytest.raises(PipelineError) as caught:
            Pipeline(
                {0: torch.nn.Identity(), 1: torch.nn.Identity()},
                "1f1b",
                microbatches=2,
                functions={kind: lambda _: None},
                timeout=TIMEOUT,
            ).close()
        told.append(str(caught.value))
    return told


@pytest.mark.xdist_group("ranks-2")
def test_sends_and_receives_take_no_function(pools: Pools) -> None:
    for told in pools(2).run(refused_functions):
        assert len(told) == 5
        assert all("no function can take the place of" in text and "REDUCE_GRAD" in text for text in told)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 4)
def test_ranks_hold_as_many_activations_as_the_simulator_says(pools: Pools, p: int) -> None:
    cases = [Case(build(family, ranks=p, microbatches=m), steps=1) for family in FAMILIES for m in (p + 1,)]
    cases += [Case(random_schedule(random.Random(seed), p), steps=1) for seed in range(4)]
    found = pools(p).run(run_cases, cases)
    assert not faults_of(cases, found)
    for place, case in enumerate(cases):
        said = simulate(case.schedule, Costs(activation=1)).peak_memory
        assert [rank[place].peak_live for rank in found] == list(said), case


def few_buffers(family: str, microbatches: tuple[int, ...]) -> list[int]:
    """The most buffers at once in the second step, for each number of microbatches."""
    found = []
    for m in microbatches:
        schedule = build(family, ranks=torch.distributed.get_world_size(), microbatches=m)
        task = TASKS["mlp"]
        stages = dict(enumerate(task.stages(schedule.num_stages, torch.float32)))
        with closing(Pipeline(stages, schedule, loss=task.loss, timeout=TIMEOUT)) as pipeline:
            for step in range(2):
                batch = task.batch(step, m, torch.float32)
                pipeline.step(*batch.args, target=batch.target)
            found.append(pipeline.peak_buffers)
    return found


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv", "v-half", "interleaved-1f1b"])
@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p, family: p == 2 or family == "v-half")
def test_buffers_do_not_grow_with_the_number_of_microbatches(pools: Pools, p: int, family: str) -> None:
    for rank, found in enumerate(pools(p).run(few_buffers, family, (16, 64))):
        few, many = found
        assert many <= few, f"rank {rank}: {few} buffers for 16 microbatches, {many} for 64"


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 2)
def test_gpipe_has_buffers_for_the_activations_it_holds_and_few_more(pools: Pools, p: int) -> None:
    for rank, (found,) in enumerate(pools(p).run(few_buffers, "gpipe", (64,))):
        held = 64 if rank else 0
        assert found <= held + 16, f"rank {rank}"
