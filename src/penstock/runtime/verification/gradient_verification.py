"""`verify_gradients`: whether pipelines train a model as one process does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path

import torch.distributed as dist
from torch import nn

from penstock.arguments import printable, whole_number
from penstock.errors import BatchError, PenstockError, PipelineError, StepFailedError
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.local_ranks import LocalRanks
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.verification.user_model import (
    Reference,
    Source,
    UserModel,
    load_user_model,
    named_parameters,
    optimizer_for,
    relative_error,
    train_reference,
)

# The work of one rank in a verification: train in a pipeline and compare with the reference.


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor: of a gradient in one step, or of a parameter after all steps."""

    name: str
    stage: int
    step: int
    """The step, from 1."""
    error: float


@dataclass(frozen=True)
class RankErrors:
    """The largest errors on one rank."""

    loss: float
    norm: float
    gradient: Deviation | None
    parameter: Deviation | None
    tolerance: float
    draws: bool
    """Whether the model draws random numbers."""


def worst(deviations: list[Deviation]) -> Deviation | None:
    """The deviation with the largest error."""
    return max(deviations, default=None, key=lambda each: each.error)


def train_in_pipeline(source: Source, schedule: Schedule, steps: int, file: Path) -> RankErrors | None:
    """Train with a schedule and compare with the reference; None on a rank that the schedule does not use."""
    group = _first_ranks(schedule.num_ranks)
    if group is None:
        return None
    user_model = load_user_model(source, schedule.graph)
    reference = Reference(file)
    reference.check_same_model(user_model, group)
    _check_equal_microbatches(user_model, schedule)
    gradients: list[Deviation] = []
    losses, norms = [], []
    with closing(_pipeline(user_model, schedule, group)) as pipeline:
        modules = _modules_by_stage(pipeline, user_model)
        optimizer = optimizer_for(pipeline.parameters())
        for step in range(steps):
            result = pipeline.step(*user_model.args, target=user_model.target, **user_model.kwargs)
            losses.append(relative_error(result.loss, reference.header["losses"][step]))
            norm = float(pipeline.clip_grad_norm_(inf))
            norms.append(relative_error(norm, reference.header["norms"][step]))
            for stage, name, weight in _parameters(modules):
                error = reference.gradient_error(step, name, weight.grad)
                gradients.append(Deviation(name, stage, pipeline.completed_steps, error))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    parameters = [
        Deviation(name, stage, steps, reference.parameter_error(name, weight))
        for stage, name, weight in _parameters(modules)
    ]
    header = reference.header
    return RankErrors(
        max(losses), max(norms), worst(gradients), worst(parameters), header["tolerance"], draws=header["draws"]
    )


def _pipeline(user_model: UserModel, schedule: Schedule, group: dist.ProcessGroup) -> Pipeline:
    stages = user_model.stages(schedule.graph)
    own = split_metadata(stages[0], "stage_graph")
    if schedule.graph.is_chain and own is not None and not own.is_chain:  # a family, and a traced module
        schedule = schedule.over(own)
    return Pipeline(
        stages,
        schedule,
        loss=user_model.losses,
        tokens=user_model.tokens,
        group=group,
    )


def _check_equal_microbatches(user_model: UserModel, schedule: Schedule) -> None:
    rows = None if user_model.tokens is not None else user_model.rows
    if rows is not None and rows % schedule.microbatches:
        raise BatchError(
            f"{rows} rows cannot be split into {schedule.microbatches} microbatches of the same "
            "size, and the mean of their losses would not be that of the batch: change the batch or the "
            "number of microbatches, or return tokens, a function that counts the tokens of a target"
        )


def _modules_by_stage(pipeline: Pipeline, user_model: UserModel) -> dict[int, nn.ModuleDict]:
    """The modules of this rank and of its losses, with the names that the reference uses."""
    return {
        stage: nn.ModuleDict({"model": user_model.named(stage, module)} | user_model.loss_modules(stage))
        for stage, module in pipeline.modules.items()
    }


def _parameters(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    for stage, module in modules.items():
        for name, weight in named_parameters(module):
            yield stage, name, weight


@cache
def _first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first `count` ranks, None on all others; every rank must call this."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


# `verify_gradients`: whether pipelines train a model as one process does.
#
#     def parts():
#         model = nn.Sequential(...)
#         return model, nn.functional.mse_loss, torch.randn(16, 8), torch.randn(16, 2)
#
#     verdicts = verify_gradients(parts, [penstock.build("zbv", ranks=2, microbatches=4)])
#
# Every process calls the function, each time with the same seeds. It returns the model, the loss, the arguments
# of the model (a tuple if there are several) and the target, or a dict with these and more. One process trains
# with the whole batch, every schedule with its microbatches, on processes of this machine. Loss, gradients,
# their norm, and the weights after all steps are compared. An error is the largest difference in a tensor,
# relative to the largest value in it, or to a thousandth of the largest value of all tensors if that is
# larger: some gradients are only rounding errors.


@dataclass(frozen=True)
class Verdict:
    """The result for one schedule; errors are relative, `inf` where a value is missing or not finite."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    tolerance: float
    loss: float = inf
    """The largest error of the loss over all steps."""
    norm: float = inf
    """The largest error of the gradient norm over all steps."""
    gradient: Deviation | None = None
    """The gradient with the largest error over all parameters and steps; None if there is none."""
    parameter: Deviation | None = None
    """The parameter with the largest error after all steps."""
    rejected: str = ""
    """Why the schedule could not run; empty if it did."""
    cause: str = ""
    """The likely cause of a mismatch."""

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        return not self.rejected and self.worst <= self.tolerance

    @property
    def worst(self) -> float:
        """The largest error."""
        errors = [each.error for each in (self.gradient, self.parameter) if each is not None]
        return max(self.loss, self.norm, *errors)


def verify_gradients(
    source: Source, schedules: Sequence[Schedule], *, steps: int = 2, tolerance: float | None = None
) -> list[Verdict]:
    """Train with every schedule on processes of this machine, and compare with one process.

    `source` is a top-level function of a module, or its path as in `package.module:function`. The default
    tolerance depends on the dtype of the model: 1e-4 for float32, 1e-9 for float64.
    """
    return list(verdicts(source, schedules, steps=steps, tolerance=tolerance))


def verdicts(
    source: Source,
    schedules: Sequence[Schedule],
    *,
    steps: int = 2,
    tolerance: float | None = None,
    ranks: LocalRanks | None = None,
) -> Iterator[Verdict]:
    """Give the verdicts of `verify_gradients` one by one; `ranks` are started ranks to use."""
    _check_arguments(source, schedules, steps, tolerance)
    count = max(schedule.num_ranks for schedule in schedules)
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory, ExitStack() as entered:
        started = ranks or entered.enter_context(LocalRanks(count))
        for schedule in schedules:
            yield _verdict(started, Path(directory), source, schedule, steps, tolerance)


def _check_arguments(
    source: Source, schedules: Sequence[Schedule], steps: int, tolerance: float | None
) -> None:
    problems = []
    if (whole_number(steps) or 0) < 1:
        problems.append(f"steps must be a whole number of at least 1 (given {printable(repr(steps))})")
    if tolerance is not None and not 0 < tolerance < inf:
        problems.append(f"the tolerance must be a relative error above 0, such as 1e-4 (given {tolerance!r})")
    if not isinstance(source, str) and "<" in getattr(source, "__qualname__", "<"):
        problems.append("the function must be at the top level of a module, not inside another function")
    if not schedules:
        problems.append("no schedule is given")
    if problems:
        raise PipelineError("; ".join(problems))


def _verdict(
    ranks: LocalRanks, directory: Path, source: Source, schedule: Schedule, steps: int, tolerance: float | None
) -> Verdict:
    """Verify one schedule; reference runs are kept in files, one per stage graph and number of microbatches."""

    def reference(microbatches: int) -> Path:
        graph = schedule.graph  # the function may depend on its number of stages
        digest = sha256(repr(graph.edges).encode()).hexdigest()
        file = directory / f"reference-{graph.num_stages}-{digest}-{microbatches}.safetensors"
        if not file.exists():
            ranks.run(train_reference, source, steps, graph, microbatches, file)
        return file

    def compare(file: Path) -> RankErrors:
        return _worst_of_ranks(ranks.run(train_in_pipeline, source, schedule, steps, file))

    whole_batch = reference(1)

    verdict = Verdict(
        schedule.name, schedule.num_ranks, schedule.num_stages, schedule.microbatches, tolerance or 0.0
    )
    if not schedule.table.has(Kind.B, Kind.I):
        return replace(verdict, rejected="it has no backward, so there are no gradients")
    try:
        errors = compare(whole_batch)
    except PenstockError as error:
        return replace(verdict, rejected=_short_message(error))
    verdict = replace(verdict, tolerance=errors.tolerance if tolerance is None else tolerance)
    verdict = _with_errors(verdict, errors)
    if verdict.equal:
        return verdict
    same_microbatches = _with_errors(verdict, compare(reference(schedule.microbatches)))
    return replace(verdict, cause=_cause(verdict, errors, equal_with_microbatches=same_microbatches.equal))


def _with_errors(verdict: Verdict, errors: RankErrors) -> Verdict:
    return replace(
        verdict,
        loss=errors.loss,
        norm=errors.norm,
        gradient=errors.gradient,
        parameter=errors.parameter,
    )


def _short_message(error: PenstockError) -> str:
    """The message without the traceback, but with the last line of the user's code."""
    if not isinstance(error, StepFailedError):
        return str(error)
    frames = [line.strip() for line in error.details.splitlines() if line.lstrip().startswith("File ")]
    return "\n  ".join([*map(str.strip, error.report.splitlines()[:2]), *frames[-1:]])


def _worst_of_ranks(results: Sequence[RankErrors | None]) -> RankErrors:
    """The largest errors of all ranks that took part."""
    ranks = [each for each in results if each is not None]
    return RankErrors(
        max(each.loss for each in ranks),
        max(each.norm for each in ranks),
        worst([each.gradient for each in ranks if each.gradient]),
        worst([each.parameter for each in ranks if each.parameter]),
        ranks[0].tolerance,
        draws=ranks[0].draws,
    )


def _cause(verdict: Verdict, errors: RankErrors, *, equal_with_microbatches: bool) -> str:
    rounding = "that may be rounding: model.double() and inputs in float64 would show it"
    if verdict.worst <= errors.tolerance:  # the default for the dtype; the given tolerance is smaller
        return rounding
    if errors.draws:
        return (
            "the model draws random numbers, as dropout does, and every process draws its own: set its rate to "
            "0, or call model.eval()"
        )
    if equal_with_microbatches:
        return (
            f"one process computes the same as the pipeline if it also splits the batch into "
            f"{verdict.microbatches} microbatches: the model or the loss depends on how a batch is split, as "
            "BatchNorm does, or a mean over something other than rows"
        )
    if isfinite(verdict.worst) and verdict.worst < 100 * verdict.tolerance and errors.tolerance > 1e-9:
        return rounding
    return (
        "one process that computes the same microbatches gets different numbers, too: a wrong or "
        "nondeterministic backward, state that is kept from one microbatch to the next, or a bug in Penstock"
    )
