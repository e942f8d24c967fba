"""Promise: gradients add up from step to step, and eval leaves no trace."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Schedule, build
from penstock.runtime import Pipeline
from tests.runtime.execution.test_gradients import FAMILIES, ranks
from tests.support.grids import small
from tests.support.models import TASKS, WIDTH, Batch, Task
from tests.support.pipelines import batch_of, gradients, pipeline_of, state
from tests.support.pool import Pools
from tests.support.reference import (
    Case,
    Outcome,
    backwards_in_order,
    differences,
    faults_of,
    forward,
    gradients_of,
    run_cases,
    split_plainly,
    step_plainly,
)

# --- accumulation --------------------------------------------------------------------------------


def run_twice(case: Case) -> Outcome:
    """Two steps on the same batch without zero_grad."""
    outcome, batch = Outcome(), batch_of(case)
    with closing(pipeline_of(case)) as pipeline:
        pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
        once = gradients(pipeline)
        for parameter in pipeline.parameters():
            parameter.grad = None
        for _ in range(2):
            pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
        stages = TASKS[case.task].stages(case.schedule.num_stages, case.dtype)
        for _ in range(2):
            step_plainly(stages, TASKS[case.task], batch, case.schedule.microbatches)
        found = gradients(pipeline)
        wanted = {
            f"{stage}.{name}": value
            for stage in pipeline.modules
            for name, value in gradients_of(stages[stage]).items()
        }
        outcome.faults += differences("as one process", found, wanted, exact=backwards_in_order(case.schedule))
        doubled = {name: None if value is None else 2 * value for name, value in once.items()}
        # one microbatch: the sum of two equal numbers is exact, and no other number comes in between
        exact = case.schedule.microbatches == 1
        outcome.faults += differences("twice", found, doubled, exact=exact, slack=10)
    return outcome


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 2)
def test_two_steps_without_zero_grad_give_twice_the_gradient(pools: Pools, p: int) -> None:
    cases = [
        Case(build(family, ranks=p, microbatches=m), task)
        for family in ("gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev")
        for m, task in ((1, "mlp"), (4, "transformer"))
    ]
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_twice))


# --- eval ----------------------------------------------------------------------------------------


def run_eval(case: Case) -> Outcome:
    """Eval before, between and after steps: right, and without a trace."""
    outcome, task, schedule = Outcome(), TASKS[case.task], case.schedule
    m, stages = schedule.microbatches, TASKS[case.task].stages(schedule.num_stages, case.dtype)
    with closing(pipeline_of(case, stages)) as pipeline:
        for module in list(pipeline.modules.values())[:1]:
            next(iter(module.children())).eval()  # a part that somebody set to eval stays so
        for step in range(3):
            batch = batch_of(case, step)
            wanted = _evaluated(stages, pipeline, task, batch, m)
            before = gradients(pipeline), state(pipeline), _flags(pipeline), torch.get_rng_state()
            with_target = pipeline.eval(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
            without = pipeline.eval(*batch.args, **batch.kwargs)
            after = gradients(pipeline), state(pipeline), _flags(pipeline), torch.get_rng_state()
            outcome.faults += differences("gradient after eval", after[0], before[0], exact=True)
            outcome.faults += differences("state after eval", after[1], before[1], exact=True)
            if after[2] != before[2]:
                outcome.faults.append("eval changed training flags")
            if not torch.equal(after[3], before[3]):
                outcome.faults.append("eval changed the random state")
            outcome.losses.append(with_target.loss)
            outcome.faults += _eval_faults(pipeline, with_target, without, wanted)
            stepped = pipeline.step(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
            if (stepped.outputs is None) != (with_target.outputs is None):
                outcome.faults.append("step gives outputs on another rank than eval")
            if case.task in ("mlp", "transformer", "uneven") and stepped.outputs is not None:
                found, right = {"outputs": stepped.outputs}, {"outputs": with_target.outputs}
                outcome.faults += differences("step", found, right, exact=True)
            with torch.no_grad():
                for parameter in pipeline.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            _share_weights(stages, schedule)
    return outcome


def _flags(pipeline: Pipeline) -> list[bool]:
    return [part.training for module in pipeline.modules.values() for part in module.modules()]


def _evaluated(
    stages: list[nn.Module], pipeline: Pipeline, task: Task, batch: Batch, m: int
) -> tuple[list[float], list[Any]]:
    """The losses and the outputs by plain modules in eval mode."""
    plain = copy.deepcopy(stages)
    for index, stage in enumerate(plain):
        if index in pipeline.modules:
            stage.load_state_dict(pipeline.modules[index].state_dict())
        stage.eval()
    args, targets = split_plainly(batch.args[0], m), split_plainly(batch.target, m)
    kwargs = [{name: split_plainly(value, m)[k] for name, value in batch.kwargs.items()} for k in range(m)]
    with torch.no_grad():
        outputs = [forward(plain, (args[k],), kwargs[k]) for k in range(m)]
        return [float(task.loss(outputs[k], targets[k])) for k in range(m)], outputs


def _share_weights(stages: list[nn.Module], schedule: Schedule) -> None:
    """Every rank gets the state of every stage, so that it can compute the whole model."""
    if dist.is_initialized():
        for index, stage in enumerate(stages):
            for value in stage.state_dict().values():
                dist.broadcast(value, schedule.placement.stage_to_rank[index])


def _eval_faults(
    pipeline: Pipeline, with_target: Any, without: Any, wanted: tuple[list[float], list[Any]]
) -> list[str]:
    faults = []
    losses, outputs = wanted
    if with_target.losses is None or with_target.losses.tolist() != losses:
        faults.append(f"eval: losses {with_target.losses}, not {losses}")
    if (without.loss, without.losses, without.outputs) != (None, None, None):
        faults.append(f"eval without target gave {without}")
    last = pipeline.schedule.num_stages - 1 in pipeline.modules
    if (with_target.outputs is not None) != last:
        faults.append(f"outputs {'missing' if last else 'where the last stage is not'}")
    elif last:
        merged = with_target.outputs["hidden"] if isinstance(with_target.outputs, dict) else with_target.outputs
        right = torch.cat([each["hidden"] if isinstance(each, dict) else each for each in outputs])
        if merged.requires_grad or not torch.equal(merged, right):
            faults.append("other outputs")
    return faults


@pytest.mark.parametrize("p", ranks(2, 4))
@small(lambda p: p == 2)
def test_eval_is_right_and_leaves_no_trace(pools: Pools, p: int) -> None:
    tasks = ("transformer", "batch-norm", "dropout", "nested", "mlp", "uneven")
    cases = [
        Case(build(family, ranks=p, microbatches=p + 1), tasks[place % len(tasks)])
        for place, family in enumerate(FAMILIES)
    ]
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_eval))


class Drawing(nn.Module):
    """Draws random numbers, training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + torch.rand_like(y)


def drawn() -> bool:
    stages = [Drawing() for _ in range(4)]
    with closing(pipeline_of(Case(build("zbv", ranks=2, microbatches=3)), list(stages))) as pipeline:
        before = torch.get_rng_state()
        pipeline.eval(torch.ones(6, WIDTH))
        return torch.equal(before, torch.get_rng_state())


@pytest.mark.xdist_group("ranks-2")
def test_eval_gives_random_numbers_back(pools: Pools) -> None:
    assert pools(2).run(drawn) == [True, True]


# --- one rank ------------------------------------------------------------------------------------


def alone(family: str, stages: int | None) -> Schedule:
    return build(family, ranks=1, microbatches=3, stages_per_rank=stages)


@pytest.mark.parametrize(
    ("family", "stages"),
    [("1f1b", None), ("gpipe", None), ("interleaved-1f1b", 3), ("zbv", None), ("interleaved-zero-bubble", 4)],
)
@pytest.mark.usefixtures("one_thread")
def test_one_rank_needs_no_process_group(family: str, stages: int | None) -> None:
    schedule = alone(family, stages)
    for task in ("transformer", "nested", "batch-norm"):
        case = Case(schedule, task)
        assert not run_twice(case).faults
        assert not run_eval(case).faults
