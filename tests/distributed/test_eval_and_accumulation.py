"""Promises around the step: gradients add up, eval leaves no trace, hooks fire once, errors are clear."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Placement, Schedule, build
from penstock.errors import PenstockError
from penstock.lowering import SplitBackward
from penstock.runtime import Pipeline
from tests.distributed.conftest import Pools
from tests.distributed.models import TASKS, WIDTH, Batch, Task
from tests.distributed.reference import (
    TIMEOUT,
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
from tests.distributed.test_gradients import FAMILIES, ranks


def pipeline_of(case: Case, stages: list[nn.Module] | None = None, **options: Any) -> Pipeline:
    task = TASKS[case.task]
    made = task.stages(case.schedule.num_stages, case.dtype) if stages is None else stages
    given = {"loss": task.loss, "tokens": task.tokens, "timeout": TIMEOUT, **options}
    return Pipeline(dict(enumerate(made)), case.schedule, **given)


def batch_of(case: Case, step: int = 0) -> Batch:
    return TASKS[case.task].batch(step, case.schedule.microbatches, case.dtype)


def gradients(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name}": gradient
        for stage, module in pipeline.modules.items()
        for name, gradient in gradients_of(module).items()
    }


def state(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name}": value.clone()
        for stage, module in pipeline.modules.items()
        for name, value in module.state_dict().items()
    }


# --- accumulation ----------------------------------------------------------------------------------


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
def test_two_steps_without_zero_grad_give_twice_the_gradient(pools: Pools, p: int) -> None:
    cases = [
        Case(build(family, ranks=p, microbatches=m), task)
        for family in ("gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev")
        for m, task in ((1, "mlp"), (4, "transformer"))
    ]
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_twice))


# --- eval ------------------------------------------------------------------------------------------


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


# --- one rank --------------------------------------------------------------------------------------


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


# --- losses ----------------------------------------------------------------------------------------


def weighted(schedule: Schedule) -> Outcome:
    """The loss of targets with unequal numbers of tokens is the mean over all tokens of the batch."""
    outcome, task = Outcome(), TASKS["padded"]
    case = Case(schedule, "padded", dtype=torch.float64)
    batch = batch_of(case)
    stages = task.stages(schedule.num_stages, case.dtype)
    with closing(pipeline_of(case, stages)) as pipeline:
        result = pipeline.step(*batch.args, target=batch.target)
        evaluated = pipeline.eval(*batch.args, target=batch.target)
        outcome.losses += [result.loss, evaluated.loss]
        found = gradients(pipeline)
    plain = task.stages(schedule.num_stages, case.dtype)
    whole = task.loss(forward(plain, batch.args, {}), batch.target)
    whole.backward()  # type: ignore[no-untyped-call]
    for loss in outcome.losses:
        if loss is None or abs(loss - float(whole)) > 1e-12:
            outcome.faults.append(f"loss {loss}, not {float(whole)}")
    wanted = {
        f"{stage}.{name}": g for stage in pipeline.modules for name, g in gradients_of(plain[stage]).items()
    }
    outcome.faults += differences("gradient of the whole batch", found, wanted, exact=False)
    return outcome


@pytest.mark.parametrize("p", ranks(2, 4))
def test_losses_weighted_by_tokens_are_the_mean_over_the_whole_batch(pools: Pools, p: int) -> None:
    cases = [build(family, ranks=p, microbatches=5) for family in ("1f1b", "zbv", "looped-bfs", "gpipe")]
    assert not faults_of(cases, pools(p).run(run_cases, cases, weighted))


def run_without_tokens(schedule: Schedule) -> Outcome:
    """One microbatch has nothing but padding."""
    outcome, task = Outcome(), TASKS["padded"]
    case = Case(schedule, "padded", dtype=torch.float64)
    batch = batch_of(case)
    batch.target[:2] = -100
    plain = task.stages(schedule.num_stages, case.dtype)
    whole = task.loss(forward(plain, batch.args, {}), batch.target)
    whole.backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(case)) as pipeline:
        result = pipeline.step(*batch.args, target=batch.target)
        found = gradients(pipeline)
    if result.loss is None or not abs(result.loss - float(whole)) < 1e-12:
        outcome.faults.append(f"loss {result.loss}, not {float(whole)}")
    wanted = {
        f"{stage}.{name}": g for stage in pipeline.modules for name, g in gradients_of(plain[stage]).items()
    }
    outcome.faults += differences("gradient", found, wanted, exact=False)
    return outcome


@pytest.mark.xdist_group("ranks-2")
def test_a_microbatch_without_tokens_counts_for_nothing(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=4) for family in ("1f1b", "zbv")]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_without_tokens))


# --- inputs that want gradients --------------------------------------------------------------------


def run_input_gradient(case: Case) -> Outcome:
    outcome, batch, m = Outcome(), batch_of(case), case.schedule.microbatches
    x, plain_x = (batch.args[0].clone().requires_grad_() for _ in range(2))
    with closing(pipeline_of(case)) as pipeline:
        for _ in range(2):
            pipeline.step(x, target=batch.target)
        stages = TASKS[case.task].stages(case.schedule.num_stages, case.dtype)
        for _ in range(2):
            step_plainly(stages, TASKS[case.task], Batch((plain_x,), batch.target), m)
        wanted = plain_x.grad if 0 in pipeline.modules else None
        outcome.faults += differences("x", {"grad": x.grad}, {"grad": wanted}, exact=True)
    return outcome


@pytest.mark.parametrize("p", ranks(2, 4))
def test_a_batch_that_requires_grad_gets_its_gradient(pools: Pools, p: int) -> None:
    cases = [
        Case(build(family, ranks=p, microbatches=5), task)
        for family, task in (("1f1b", "mlp"), ("zb-h1", "uneven"), ("zbv", "nested"), ("looped-bfs", "mlp"))
    ]
    assert not faults_of(cases, pools(p).run(run_cases, cases, run_input_gradient))


# --- hooks -----------------------------------------------------------------------------------------


def run_hooks(case: Case) -> Outcome:
    """How often the hooks of each parameter fire in two steps."""
    outcome, fired = Outcome(), Counter[str]()
    m = case.schedule.microbatches
    with closing(pipeline_of(case)) as pipeline:
        wanted: Counter[str] = Counter()
        for stage, module in pipeline.modules.items():
            for name, parameter in module.named_parameters():
                key = f"{stage}.{name}"
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(_counting(fired, key))
                wanted[key] = 2 * m
        for step in range(2):
            batch = batch_of(case, step)
            pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
    if fired != wanted:
        outcome.faults.append(f"fired {fired - wanted} too often, {wanted - fired} too seldom")
    return outcome


def _counting(fired: Counter[str], key: str) -> Callable[[Tensor], None]:
    def count(_: Tensor) -> None:
        fired[key] += 1

    return count


def schedules_for_hooks() -> list[Schedule]:
    built = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv", "dualpipev")]
    return [*built, SplitBackward()(built[0])]


@pytest.mark.xdist_group("ranks-2")
@pytest.mark.parametrize("task", ["mlp", "transformer", "repeated", "checkpointed", "batch-norm"])
def test_hooks_of_parameters_fire_once_for_each_microbatch(pools: Pools, task: str) -> None:
    cases = [Case(schedule, task) for schedule in schedules_for_hooks()]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_hooks))


@pytest.mark.xdist_group("ranks-2")
def test_hooks_of_a_weight_used_outside_its_layer_fire_once_for_each_microbatch(pools: Pools) -> None:
    cases = [Case(schedule, "tied") for schedule in schedules_for_hooks()]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_hooks))


@pytest.mark.xdist_group("ranks-2")
def test_weights_used_outside_their_layer_get_the_same_bits(pools: Pools) -> None:
    cases = [Case(schedule, "tied thrice", steps=1, demands_bits=True) for schedule in schedules_for_hooks()]
    assert not faults_of(cases, pools(2).run(run_cases, cases))


# --- weights that change their part ----------------------------------------------------------------


def run_shared_by_stages(case: tuple[str, Schedule]) -> Outcome:
    """The first and the last stage are on one rank and share a weight, or a whole layer."""
    what, schedule = case
    outcome, task, m = Outcome(), TASKS["mlp"], schedule.microbatches
    made: list[list[Any]] = [task.stages(schedule.num_stages, torch.float64) for _ in range(2)]
    for stages in made:
        if what == "weight":
            stages[-1][0].weight = stages[0][0].weight
        else:
            stages[-1][0] = stages[0][0]
    stages, plain = made
    with closing(pipeline_of(Case(schedule), stages)) as pipeline:
        if len(list(pipeline.parameters())) != len({id(weight) for weight in pipeline.parameters()}):
            outcome.faults.append("a weight is there twice")
        for step in range(2):
            batch = task.batch(step, m, torch.float64)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, m)
        for index in pipeline.modules:
            found, wanted = gradients_of(stages[index]), gradients_of(plain[index])
            outcome.faults += differences(f"stage {index}", found, wanted, exact=False, slack=10)
    return outcome


@pytest.mark.xdist_group("ranks-2")
def test_stages_of_one_rank_may_share_weights(pools: Pools) -> None:
    built = [build(family, ranks=2, microbatches=5) for family in ("zbv", "v-min", "dualpipev")]
    cases = [(what, schedule) for what in ("weight", "layer") for schedule in built]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_shared_by_stages))


def run_thawing(schedule: Schedule) -> Outcome:
    """Other stages are frozen in every step."""
    outcome, task, m = Outcome(), TASKS["transformer"], schedule.microbatches
    stages, plain = (task.stages(schedule.num_stages, torch.float32) for _ in range(2))
    with closing(pipeline_of(Case(schedule, "transformer"), stages)) as pipeline:
        for step in range(4):
            for made in (stages, plain):
                for index, stage in enumerate(made):
                    stage.requires_grad_((index + step) % 2 == 0 or step == 3)
                    stage.zero_grad()
            batch = task.batch(step, m, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, m)
            for index in pipeline.modules:
                found, wanted = gradients_of(stages[index]), gradients_of(plain[index])
                outcome.faults += differences(f"step {step} stage {index}", found, wanted, exact=True)
    return outcome


@pytest.mark.xdist_group("ranks-2")
def test_stages_may_be_frozen_and_thawed_between_steps(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv", "dualpipev")]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_thawing))


def run_autocast(schedule: Schedule) -> Outcome:
    outcome, task, m = Outcome(), TASKS["transformer"], schedule.microbatches
    stages, plain = (task.stages(schedule.num_stages, torch.float32) for _ in range(2))
    with closing(pipeline_of(Case(schedule, "transformer"), stages)) as pipeline:
        for step in range(2):
            batch = task.batch(step, m, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                pipeline.step(*batch.args, target=batch.target)
            with torch.autocast("cpu", torch.bfloat16):
                step_plainly(plain, task, batch, m)
        for index in pipeline.modules:
            found, wanted = gradients_of(stages[index]), gradients_of(plain[index])
            outcome.faults += differences(f"stage {index}", found, wanted, exact=False, slack=1e4)
    return outcome


@pytest.mark.xdist_group("ranks-2")
def test_steps_run_under_autocast(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv")]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_autocast))


# --- compiled stages -------------------------------------------------------------------------------


def run_compiled(case: tuple[str, Schedule]) -> Outcome:
    backend, schedule = case
    outcome, task = Outcome(), TASKS["mlp"]
    stages = task.stages(schedule.num_stages, torch.float32)
    compiled: list[Any] = [
        torch.compile(stage, backend=backend) if index % 2 else stage for index, stage in enumerate(stages)
    ]
    plain = task.stages(schedule.num_stages, torch.float32)
    with closing(pipeline_of(Case(schedule), compiled)) as pipeline:
        for step in range(2):
            batch = task.batch(step, schedule.microbatches, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, schedule.microbatches)
        for index in pipeline.modules:
            found, wanted = gradients_of(stages[index]), gradients_of(plain[index])
            outcome.faults += differences(f"stage {index}", found, wanted, exact=False)
    torch._dynamo.reset()
    return outcome


@pytest.mark.xdist_group("ranks-2")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_stages_train_with_split_backwards(pools: Pools, backend: str) -> None:
    cases = [(backend, build(family, ranks=2, microbatches=3)) for family in ("zbv", "zb-h1", "1f1b")]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_compiled))


# --- what users do wrong ---------------------------------------------------------------------------


def told_by(make: Callable[[], object]) -> str:
    try:
        made = make()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, Pipeline):
        made.close()
    return ""


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def wrong_pipelines() -> dict[str, str]:
    rank = dist.get_rank()
    two = build("1f1b", ranks=2, microbatches=4)
    short: dict[str, Any] = {"timeout": 10.0}
    return {
        "modules": told_by(lambda: Pipeline(layers(3), two, **short)),
        "mapping": told_by(lambda: Pipeline(dict.fromkeys((5, 6), layers(1)[0]), two, **short)),
        "ranks": told_by(lambda: Pipeline(layers(1), build("1f1b", ranks=4, microbatches=4), **short)),
        "microbatches": told_by(lambda: Pipeline(layers(1), two, microbatches=5, **short)),
        "no microbatches": told_by(lambda: Pipeline(layers(1), "1f1b", **short)),
        "uneven": told_by(lambda: Pipeline(dict(enumerate(layers(3))), "1f1b", microbatches=4, **short)),
        "other schedules": told_by(
            lambda: Pipeline(layers(1), build(("1f1b", "gpipe")[rank], ranks=2, microbatches=4), **short)
        ),
        "other microbatches": told_by(
            lambda: Pipeline(layers(1), build("1f1b", ranks=2, microbatches=4 + rank), **short)
        ),
        "other placements": told_by(
            lambda: Pipeline(
                dict(enumerate(layers(4))),
                (build("zbv", ranks=2, microbatches=4), build("interleaved-1f1b", ranks=2, microbatches=4))[
                    rank
                ],
                **short,
            )
        ),
    }


WRONG_PIPELINES = {
    "modules": ("PipelineError", "3 stage modules", "has 1 stages"),
    "mapping": ("PipelineError", "is not given"),
    "ranks": ("PipelineError", "for 4 ranks", "has 2"),
    "microbatches": ("PipelineError", "for 4 microbatches", "microbatches=5"),
    "no microbatches": ("PipelineError", "microbatches="),
    "uneven": ("PipelineError", "3 stages", "2 ranks"),
    "other schedules": ("PipelineError", "do not agree", "schedule: rank 0", "rank 0", "rank 1"),
    "other microbatches": ("PipelineError", "do not agree", "microbatches: rank 0: 4; rank 1: 5"),
    "other placements": ("PipelineError", "do not agree"),
}


@pytest.mark.xdist_group("ranks-2")
def test_pipelines_that_cannot_be_are_refused_on_every_rank(pools: Pools) -> None:
    for rank, told in enumerate(pools(2).run(wrong_pipelines)):
        for name, words in WRONG_PIPELINES.items():
            assert all(word in told[name] for word in words), f"rank {rank}, {name}: {told[name]!r}"


def wrong_step(name: str) -> tuple[str, float | None]:
    """What the step says, and the loss of a right step of a new pipeline after it."""
    schedule = build("1f1b", ranks=2, microbatches=4)
    x, y = torch.ones(8, WIDTH), torch.zeros(8, WIDTH)
    options: dict[str, Any] = {"loss": TASKS["mlp"].loss, "timeout": 5.0}
    if name == "no loss":
        options["loss"] = None
    elif name == "many losses":
        options["loss"] = lambda output, target: (output - target).sum(1)
    elif name == "loss is no tensor":
        options["loss"] = lambda _output, _target: 1.0
    elif name == "no tokens":
        options["tokens"] = lambda _target: 0
    pipeline = pipeline_of(Case(schedule), None, **options)
    with closing(pipeline), torch.set_grad_enabled(name != "no grad"):
        told = told_by(
            {
                "few rows": lambda: pipeline.step(x[:3], target=y[:3]),
                "few targets": lambda: pipeline.step(x, target=y[:3]),
                "short list": lambda: pipeline.step([x, x], target=y),
                "module fails": lambda: pipeline.step(x[:, :3], target=y),
            }.get(name, lambda: pipeline.step(x, target=y))
        )
    with closing(pipeline_of(Case(schedule))) as pipeline:
        return told, pipeline.step(x, target=y).loss


WRONG_STEPS = {
    "no grad": ("use eval()",),
    "many losses": ("one number", "shape [2]", "step 1 failed on rank 1"),
    "loss is no tensor": ("one number", "float"),
    "module fails": ("step 1 failed on rank 0", "shapes"),
    "no loss": ("needs a loss",),
    "few rows": ("has 3 along dimension 0 for 4 microbatches",),
    "few targets": ("has 3 along dimension 0 for 4 microbatches",),
    "short list": ("has 2 entries for 4 microbatches",),
    "no tokens": ("nothing to weigh",),
}


@pytest.mark.xdist_group("ranks-2")
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused_on_every_rank_in_the_same_words(pools: Pools, name: str) -> None:
    answers = pools(2).run(wrong_step, name)
    for rank, (told, loss) in enumerate(answers):
        assert all(word in told for word in WRONG_STEPS[name]), f"rank {rank}: {told!r}"
        assert loss is not None


@pytest.mark.xdist_group("ranks-2")
def test_a_pipeline_runs_again_after_it_was_closed(pools: Pools) -> None:
    assert pools(2).run(closed_and_used) == [True, True]


def closed_and_used() -> bool:
    case = Case(build("zbv", ranks=2, microbatches=4))
    pipeline, batch = pipeline_of(case), batch_of(case)
    losses = []
    for _ in range(3):
        losses.append(pipeline.step(*batch.args, target=batch.target).loss)
        pipeline.close()
        pipeline.close()
    return len(set(losses)) == 1


@pytest.mark.xdist_group("ranks-2")
def test_several_pipelines_run_side_by_side(pools: Pools) -> None:
    assert pools(2).run(side_by_side) == [True, True]


def side_by_side() -> bool:
    cases = [Case(build(family, ranks=2, microbatches=4)) for family in ("1f1b", "zbv")]
    pipelines = [pipeline_of(case) for case in cases]
    batches = [batch_of(case) for case in cases]
    found = [
        [each.step(*batch.args, target=batch.target).loss for each, batch in zip(pipelines, batches)]
        for _ in range(3)
    ]
    for each in pipelines:
        each.close()
    return all(losses == found[0] for losses in found)


@pytest.mark.xdist_group("ranks-2")
def test_a_placement_of_ones_own_evaluates_with_neighbours_on_one_rank(pools: Pools) -> None:
    placement = Placement((1, 1, 0, 0, 1))
    rows = ["2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1", "0F0 1F0 0F1 1F1 4F1 4F0 4B1 4B0 1B1 0B1 1B0 0B0"]
    cases = [Case(Schedule(rows, placement, 2), "mlp")]
    assert not faults_of(cases, pools(2).run(run_cases, cases, run_eval))
