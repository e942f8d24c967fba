"""Runs `eval` before, between and after steps, and compares it with plain modules."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock import Schedule
from penstock.runtime import Pipeline
from tests.support.models import TASKS, Batch, Task
from tests.support.pipelines import batch_of, gradients, pipeline_of, state
from tests.support.reference import Case, Outcome, differences, forward, split_plainly

__all__ = ["run_eval"]


def run_eval(case: Case) -> Outcome:
    """Eval before, between and after steps: correct, and without side effects."""
    outcome, task, schedule = Outcome(), TASKS[case.task], case.schedule
    m, stages = schedule.microbatches, TASKS[case.task].stages(schedule.num_stages, case.dtype)
    with closing(pipeline_of(case, stages)) as pipeline:
        for module in list(pipeline.modules.values())[:1]:
            next(iter(module.children())).eval()  # a submodule that a user set to eval mode stays so
        for step in range(3):
            batch = batch_of(case, step)
            wanted = _evaluated(stages, pipeline, task, batch, m)
            before = gradients(pipeline), state(pipeline), _flags(pipeline), torch.get_rng_state()
            with_target = pipeline.eval(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
            without = pipeline.eval(*batch.args, **batch.kwargs)
            after = gradients(pipeline), state(pipeline), _flags(pipeline), torch.get_rng_state()
            outcome.problems += differences("gradient after eval", after[0], before[0], exact=True)
            outcome.problems += differences("state after eval", after[1], before[1], exact=True)
            if after[2] != before[2]:
                outcome.problems.append("eval changed training flags")
            if not torch.equal(after[3], before[3]):
                outcome.problems.append("eval changed the random state")
            outcome.losses.append(with_target.loss)
            outcome.problems += _eval_problems(pipeline, with_target, without, wanted)
            stepped = pipeline.step(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
            if (stepped.outputs is None) != (with_target.outputs is None):
                outcome.problems.append("step gives outputs on another rank than eval")
            if case.task in ("mlp", "transformer", "uneven") and stepped.outputs is not None:
                found, right = {"outputs": stepped.outputs}, {"outputs": with_target.outputs}
                outcome.problems += differences("step", found, right, exact=True)
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
    """The losses and the outputs of plain modules in eval mode."""
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


def _eval_problems(
    pipeline: Pipeline, with_target: Any, without: Any, wanted: tuple[list[float], list[Any]]
) -> list[str]:
    problems = []
    losses, outputs = wanted
    if with_target.losses is None or with_target.losses.tolist() != losses:
        problems.append(f"eval: losses {with_target.losses}, not {losses}")
    if (without.loss, without.losses, without.outputs) != (None, None, None):
        problems.append(f"eval without target gave {without}")
    last = pipeline.schedule.num_stages - 1 in pipeline.modules
    if (with_target.outputs is not None) != last:
        problems.append(f"outputs {'missing' if last else 'where the last stage is not'}")
    elif last:
        merged = with_target.outputs["hidden"] if isinstance(with_target.outputs, dict) else with_target.outputs
        right = torch.cat([each["hidden"] if isinstance(each, dict) else each for each in outputs])
        if merged.requires_grad or not torch.equal(merged, right):
            problems.append("other outputs")
    return problems
