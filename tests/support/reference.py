"""Training in one process with plain autograd, and the comparison of a pipeline with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from penstock import Kind, Schedule
from penstock.runtime import Pipeline
from penstock.runtime.config import CustomFunction
from tests.support.models import TASKS, Batch, Task
from tests.support.schedule_order import backwards_in_order, forwards_in_order

__all__ = [
    "Case",
    "Outcome",
    "backwards_in_order",
    "differences",
    "forward",
    "forwards_in_order",
    "from_rank_0",
    "run_cases",
    "split_plainly",
    "train_plainly",
]

State = dict[str, Tensor]
TIMEOUT = 120.0


@dataclass(frozen=True)
class Case:
    """A schedule, what it trains, and how."""

    schedule: Schedule
    task: str = "mlp"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    steps: int = 2  # the second begins with a state of the optimizer
    demands_bits: bool = False
    """Whether to compare bits also with a split backward, where the task does not promise them."""

    def __str__(self) -> str:
        s = self.schedule
        about = f"{s.name} p={s.num_ranks} stages={s.num_stages} m={s.microbatches}"
        return f"{about} {self.task} {self.optimizer} {str(self.dtype).removeprefix('torch.')}"


@dataclass
class Outcome:
    """What one rank found in a case."""

    problems: list[str] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    peak_live: int = 0
    peak_buffers: int = 0


# --- in one process --------------------------------------------------------------------------------


def split_plainly(value: Any, m: int) -> list[Any]:
    """Lists are microbatches already, tensors are split by rows, everything else is for all microbatches."""
    if isinstance(value, list):
        return value
    if isinstance(value, Tensor) and value.dim():
        return list(value.tensor_split(m))
    return [value] * m


def forward(stages: Iterable[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages one after the other; a tuple becomes positional arguments."""
    value: Any = args
    for stage in stages:
        value = stage(*value, **kwargs) if type(value) is tuple else stage(value, **kwargs)
    return value


def step_plainly(stages: Sequence[nn.Module], task: Task, batch: Batch, m: int) -> tuple[list[Tensor], float]:
    """Microbatch by microbatch, each loss weighted: the losses and their weighted sum."""
    args = [split_plainly(value, m) for value in batch.args]
    kwargs = {name: split_plainly(value, m) for name, value in batch.kwargs.items()}
    targets = split_plainly(batch.target, m)
    weights = [1 / m] * m
    if task.tokens is not None:
        counts = [task.tokens(target) for target in targets]
        weights = [count / sum(counts) for count in counts]
    losses = []
    for k in range(m):
        named = {name: parts[k] for name, parts in kwargs.items()}
        loss = task.loss(forward(stages, tuple(parts[k] for parts in args), named), targets[k])
        (loss * weights[k]).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses, sum(float(loss) * weight for loss, weight in zip(losses, weights))


@dataclass
class Trained:
    """The result of a training: per step the losses and the gradients by stage, and the final states."""

    losses: list[list[float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    gradients: list[list[dict[str, Tensor | None]]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if weight.grad is None else weight.grad.clone() for name, weight in module.named_parameters()
    }


def optimizer_of(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        trained = [nn.Parameter(torch.zeros(()))]
    return SGD(trained, lr=0.1, momentum=0.9) if name == "sgd" else AdamW(trained, lr=0.01)


def train_plainly(task: str, optimizer: str, dtype: torch.dtype, steps: int, stages: int, m: int) -> Trained:
    """The whole training in this process."""
    made, result = TASKS[task].stages(stages, dtype), Trained()
    whole = nn.ModuleList(made)
    optimizing = optimizer_of(optimizer, whole.parameters())
    for step in range(steps):
        losses, total = step_plainly(made, TASKS[task], TASKS[task].batch(step, m, dtype), m)
        result.losses.append([float(loss) for loss in losses])
        result.totals.append(total)
        result.gradients.append([gradients_of(stage) for stage in made])
        optimizing.step()
        optimizing.zero_grad()
    result.states = [{name: value.clone() for name, value in stage.state_dict().items()} for stage in made]
    return result


@cache
def from_rank_0(compute: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 computes, on all ranks, which call this in the same order."""
    found = [compute(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


# --- comparing -------------------------------------------------------------------------------------


def differences(
    where: str,
    got: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    *,
    exact: bool,
    slack: float = 1,
) -> Iterator[str]:
    """What differs: in any bit, or else by more than the rounding of another order of summation."""
    if list(got) != list(wanted):
        yield f"{where}: has {list(got)}, not {list(wanted)}"
        return
    there = [value for value in wanted.values() if value is not None and value.is_floating_point()]
    scale = max((float(value.abs().max()) for value in there if value.numel()), default=0.0)
    for name, right in wanted.items():
        left = got[name]
        if left is None or right is None:
            if left is not right:
                yield f"{where} {name}: is {_described(left)}, not {_described(right)}"
            continue
        if left.shape != right.shape or left.dtype != right.dtype:
            yield f"{where} {name}: is {_described(left)}, not {_described(right)}"
        elif exact or not right.is_floating_point():
            if not torch.equal(left, right):
                yield f"{where} {name}: not the same bits, off by up to {_off(left, right):.3g} of {scale:.3g}"
        else:
            most = 1e-12 if right.dtype is torch.float64 else 1e-6
            if not _off(left, right) <= most * slack * scale:
                yield f"{where} {name}: off by up to {_off(left, right):.3g} of {scale:.3g}"


def _described(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype}{list(value.shape)}"


def _off(left: Tensor, right: Tensor) -> float:
    return float((left.to(torch.float64) - right.to(torch.float64)).abs().max()) if left.numel() else 0.0


# --- as a pipeline ---------------------------------------------------------------------------------


_groups: dict[int, dist.ProcessGroup] = {}


def first_ranks(count: int) -> dist.ProcessGroup | None:
    """A group of the first `count` ranks, None on all others; every rank must call this."""
    if count not in _groups:
        _groups[count] = dist.new_group(list(range(count)))
    return _groups[count] if dist.get_rank() < count else None


def train_in_pipeline(case: Case, functions: Mapping[Kind | str, CustomFunction] | None = None) -> Outcome:
    """Train as the case says on this rank, and compare with one process."""
    task, schedule = TASKS[case.task], case.schedule
    m, exact = schedule.microbatches, backwards_in_order(schedule)
    if task.bits == "never" or (task.bits == "fused" and not case.demands_bits and schedule.table.has(Kind.I)):
        exact = False
    plain = case.task, case.optimizer, case.dtype, case.steps, schedule.num_stages, m
    wanted: Trained = from_rank_0(train_plainly, *plain)
    outcome = Outcome()
    made = task.stages(schedule.num_stages, case.dtype)
    group = first_ranks(schedule.num_ranks)
    if group is None:
        return outcome
    with closing(
        Pipeline(
            dict(enumerate(made)),
            schedule,
            loss=task.loss,
            tokens=task.tokens,
            group=group,
            functions=functions,
            timeout=TIMEOUT,
        )
    ) as pipeline:
        optimizing = optimizer_of(case.optimizer, pipeline.parameters())
        for step in range(case.steps):
            batch = task.batch(step, m, case.dtype)
            result = pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
            outcome.peak_live, outcome.peak_buffers = pipeline.peak_live_activations, pipeline.peak_buffers
            outcome.losses.append(result.loss)
            same = exact or (step == 0 and task.bits != "never")  # the order of sums does not matter yet
            outcome.problems += _loss_problems(
                f"step {step}", result.loss, result.losses, wanted, step, exact=same
            )
            for stage, module in enumerate(made):
                right = wanted.gradients[step][stage]
                if stage not in pipeline.modules:
                    right = dict.fromkeys(right)
                where = f"step {step} stage {stage} gradient"
                outcome.problems += differences(
                    where, gradients_of(module), right, exact=exact, slack=10 if step else 1
                )
            optimizing.step()
            optimizing.zero_grad()
        for stage, module in pipeline.modules.items():
            state = module.state_dict()
            outcome.problems += differences(f"stage {stage} state", state, wanted.states[stage], exact=exact)
    return outcome


def _loss_problems(
    where: str, loss: float | None, losses: Tensor | None, wanted: Trained, step: int, *, exact: bool
) -> Iterator[str]:
    if loss is None or losses is None:
        yield f"{where}: no loss"
        return
    if exact and losses.tolist() != wanted.losses[step]:
        yield f"{where}: losses {losses.tolist()}, not {wanted.losses[step]}"
    scale = max(map(abs, wanted.losses[step]))
    if abs(loss - wanted.totals[step]) > (1e-12 if exact else 1e-6) * scale:
        yield f"{where}: loss {loss}, not {wanted.totals[step]}"


def run_cases(cases: Sequence[Any], run: Callable[[Any], Outcome] = train_in_pipeline) -> list[Outcome]:
    """Run the cases in order on this rank; an exception is a problem of its case."""
    outcomes = []
    for case in cases:
        try:
            outcome = run(case)
        except Exception:  # noqa: BLE001 -- reported by the test
            outcome = Outcome([traceback.format_exc()])
        outcomes.append(outcome)
    return outcomes


def problems_of(cases: Sequence[Any], ranks: Sequence[Sequence[Outcome]]) -> str:
    """All problems of all ranks as text, and losses that differ between ranks; empty if there are none."""
    lines = []
    for place, case in enumerate(cases):
        outcomes = [rank[place] for rank in ranks]
        for rank, outcome in enumerate(outcomes):
            lines += [f"{case}, rank {rank}: {problem}" for problem in outcome.problems[:4]]
        if any(outcome.losses != outcomes[0].losses for outcome in outcomes[: _ranks_of(case, ranks)]):
            lines.append(f"{case}: the ranks have different losses: {[outcome.losses for outcome in outcomes]}")
    return "\n".join(lines[:30])


def _ranks_of(case: Any, ranks: Sequence[Any]) -> int:
    return case.schedule.num_ranks if isinstance(case, Case) else len(ranks)
