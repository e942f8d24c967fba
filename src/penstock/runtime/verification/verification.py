"""Whether pipelines train a model as one process does: loss, gradients, their norm, weights after some steps.

    def parts():
        model = nn.Sequential(...)
        return model, nn.functional.mse_loss, torch.randn(16, 8), torch.randn(16, 2)

    verdicts = verify_gradients(parts, [penstock.build("zbv", ranks=2, microbatches=4)])

The function is called in every process, each time with the same seeds, and gives the model, the loss, what the
model is called with (a tuple of it if it takes several) and the target. One process trains with the whole
batch, every schedule with its microbatches, on processes of this machine. An error is the largest difference in
a tensor, as a share of the largest number in it, or of a thousandth of the largest of all tensors if that is
more: the gradient of some weights is nothing but rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path

from penstock.arguments import printable, whole_number
from penstock.errors import PenstockError, PipelineError, StepFailedError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.local_ranks import LocalRanks
from penstock.runtime.verification.user_model import Source
from penstock.runtime.verification.verification_worker import Deviation, Found, train_alone, train_in_pipeline

__all__ = ["Deviation", "Verdict", "verdicts", "verify_gradients"]


@dataclass(frozen=True)
class Verdict:
    """What one schedule came to; errors are shares, `inf` where something is missing or not finite."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    tolerance: float
    loss: float = inf
    """Error of the loss, the largest of all steps."""
    norm: float = inf
    """Error of the norm of all gradients, likewise."""
    gradient: Deviation | None = None
    """The worst gradient of all parameters and steps; None if there is none."""
    parameter: Deviation | None = None
    """The worst parameter after all steps."""
    refused: str = ""
    """Why it could not be run; empty if it was."""
    cause: str = ""
    """What a mismatch may come from."""

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerance."""
        return not self.refused and self.worst <= self.tolerance

    @property
    def worst(self) -> float:
        """The largest of all errors."""
        errors = [each.error for each in (self.gradient, self.parameter) if each is not None]
        return max(self.loss, self.norm, *errors)


def verify_gradients(
    source: Source, schedules: Sequence[Schedule], *, steps: int = 2, tolerance: float | None = None
) -> list[Verdict]:
    """Train on processes of this machine with every schedule, and compare with one process.

    `source` is a function of a module, or its place as in `package.module:function`. Without a tolerance, it is
    that of the model's numbers: 1e-4 for float32, 1e-9 for float64.
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
    """The same, one after the other as they are found, on ranks that are there already if they are given."""
    faults = []
    if (whole_number(steps) or 0) < 1:
        faults.append(f"steps are a whole number of at least 1 (given {printable(repr(steps))})")
    if tolerance is not None and not 0 < tolerance < inf:
        faults.append(f"a tolerance is a share above 0, such as 1e-4 (given {tolerance!r})")
    if not isinstance(source, str) and "<" in getattr(source, "__qualname__", "<"):
        faults.append(
            "processes can be given a function of a module only, not one that is made inside of another"
        )
    if not schedules:
        faults.append("no schedule is given")
    if faults:
        raise PipelineError("; ".join(faults))
    count = max(schedule.num_ranks for schedule in schedules)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, ExitStack() as opened:
        used = ranks or opened.enter_context(LocalRanks(count))
        for schedule in schedules:
            yield _verdict(used, Path(folder), source, schedule, steps, tolerance)


def _verdict(
    ranks: LocalRanks, folder: Path, source: Source, schedule: Schedule, steps: int, tolerance: float | None
) -> Verdict:
    """Of one schedule. What one process finds is in a file, by the way its batch is cut."""
    whole = folder / "whole.safetensors"
    if not whole.exists():
        ranks.run(train_alone, source, steps, 1, whole)
    about = Verdict(
        schedule.name, schedule.num_ranks, schedule.num_stages, schedule.microbatches, tolerance or 0.0
    )
    if not schedule.table.has(Kind.B, Kind.I):
        return replace(about, refused="it has no backward, so there are no gradients")
    try:
        found = _worst(ranks.run(train_in_pipeline, source, schedule, steps, whole))
    except PenstockError as error:
        return replace(about, refused=_in_short(error))
    about = replace(about, tolerance=found.tolerance if tolerance is None else tolerance)
    verdict = _with(about, found)
    if verdict.equal:
        return verdict
    cut = folder / f"cut-{schedule.microbatches}.safetensors"
    if not cut.exists():
        ranks.run(train_alone, source, steps, schedule.microbatches, cut)
    cut_alike = _with(about, _worst(ranks.run(train_in_pipeline, source, schedule, steps, cut)))
    return replace(verdict, cause=_cause(verdict, found, cut_alike_is_equal=cut_alike.equal))


def _with(about: Verdict, found: Found) -> Verdict:
    return replace(about, loss=found.loss, norm=found.norm, gradient=found.gradient, parameter=found.parameter)


def _in_short(error: PenstockError) -> str:
    """Without the traceback, but with the line of it that somebody can change."""
    if not isinstance(error, StepFailedError):
        return str(error)
    theirs = [line.strip() for line in error.details.splitlines() if line.lstrip().startswith("File ")]
    return "\n  ".join([*map(str.strip, error.report.splitlines()[:2]), *theirs[-1:]])


def _worst(found: Sequence[Found | None]) -> Found:
    """Of all ranks that took part."""
    there = [each for each in found if each is not None]
    return Found(
        max(each.loss for each in there),
        max(each.norm for each in there),
        max((each.gradient for each in there if each.gradient), default=None, key=lambda each: each.error),
        max((each.parameter for each in there if each.parameter), default=None, key=lambda each: each.error),
        there[0].tolerance,
        draws=there[0].draws,
    )


def _cause(verdict: Verdict, found: Found, *, cut_alike_is_equal: bool) -> str:
    rounding = "that may be rounding: with model.double() and inputs in float64 it would be gone"
    if verdict.worst <= found.tolerance:  # of these numbers; less was asked for
        return rounding
    if found.draws:
        return (
            "the model draws random numbers, as dropout does, and every process draws its own: set its rate to "
            "0, or call model.eval()"
        )
    if cut_alike_is_equal:
        return (
            f"one process finds the same as the pipeline when it too takes the batch in {verdict.microbatches} "
            "microbatches, one by one: the model or the loss depends on how a batch is cut, as BatchNorm does, "
            "and a mean over other things than rows"
        )
    if isfinite(verdict.worst) and verdict.worst < 100 * verdict.tolerance and found.tolerance > 1e-9:
        return rounding
    return (
        "one process that takes the same microbatches finds other numbers too: a backward that is wrong or not "
        "the same each time, state that is kept from one microbatch to the next, or a bug of Penstock"
    )
