"""Scripts for torch.distributed.pipelining that override or replace parts of it; the package is a parameter."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.support.pipelining_scripts import (
    CPU,
    OURS,
    ROWS,
    SINGLE,
    batch,
    gradients_of,
    modules,
    own_stages,
    stages_of,
)

__all__ = ["compare", "forward_orders", "refusals"]

M = 4
Observed = tuple[list[float], dict[str, Tensor], Any]


class Case:
    """A schedule and its modules; a script changes some of it."""

    def __init__(self, package: str, name: str, stage_class: Callable[[Any], Any] = lambda x: x) -> None:
        self.pipelining: Any = importlib.import_module(package)
        self.schedules: Any = importlib.import_module(f"{package}.schedules")
        self.name, self.count = name, stages_of(name, dist.get_world_size())
        self.parts = {index: modules(self.count)[index] for index in own_stages(package, name)}
        make = stage_class(self.pipelining.PipelineStage)
        self.stages = [make(part, index, self.count, CPU) for index, part in self.parts.items()]
        self.losses: list[Tensor] = []
        self.output: Any = None

    def schedule(self, own: Callable[[Any], Any] = lambda x: x) -> Any:
        make = own(self.schedules.get_schedule_class(self.name))
        return make(self.stages[0] if self.name in SINGLE else self.stages, M, loss_fn=functional.mse_loss)

    def step(self, schedule: Any, **options: Any) -> None:
        x, y = batch(0, ROWS * M)
        target = {"target": y, "losses": self.losses} if self.count - 1 in self.parts else {}
        self.output = schedule.step(*((x,) if 0 in self.parts else ()), **target, **options)

    def found(self, about: Any = None) -> Observed:
        return [float(loss.detach()) for loss in self.losses], gradients_of(self.parts.items()), about


# --- obeyed -----------------------------------------------------------------------------------------


def loss_of_a_subclass(package: str) -> Observed:
    def own(base: Any) -> Any:
        class Doubled(base):  # type: ignore[misc]
            def _compute_loss(self, output: Any, target: Any, loss_kwargs: Any = None) -> Any:
                return 2 * super()._compute_loss(output, target, loss_kwargs)

        return Doubled

    case = Case(package, "Interleaved1F1B")
    case.step(case.schedule(own))
    return case.found()


def outputs_merged_by_a_subclass(package: str) -> Observed:
    def own(base: Any) -> Any:
        class Stacked(base):  # type: ignore[misc]
            def _merge_outputs(self, output_chunks: list[Tensor]) -> Tensor:
                return torch.stack(output_chunks)

        return Stacked

    case = Case(package, "GPipe")
    case.step(case.schedule(own))
    return case.found(case.output)


def loss_replaced_after_a_step(package: str) -> Observed:
    case = Case(package, "GPipe")
    schedule = case.schedule()
    case.step(schedule)
    for part in case.parts.values():
        part.zero_grad()
    schedule._loss_fn = functional.l1_loss
    case.step(schedule)
    return case.found()


def methods_of_a_subclass(package: str, name: str) -> Observed:
    calls: Counter[str] = Counter()

    def stage_class(base: Any) -> Any:
        class Counting(base):  # type: ignore[misc]
            def forward_one_chunk(self, chunk: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
                calls["forward"] += 1
                output = super().forward_one_chunk(chunk, args, kwargs, **options)
                assert output.shape == (ROWS, 8)
                return output

            def backward_one_chunk(self, chunk: int, **options: Any) -> Any:
                calls["backward"] += 1
                calls["last"] += options["last_backward"]
                calls["loss"] += options["loss"] is not None
                return super().backward_one_chunk(chunk, **options)

            def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> Any:  # noqa: FBT001, FBT002
                calls["weight"] += 1
                calls["last"] += last_backward
                return super().backward_weight_one_chunk(chunk, last_backward=last_backward)

        return Counting

    case = Case(package, name, stage_class)
    case.step(case.schedule())
    return case.found(dict(+calls))


def forward_of_a_subclass(package: str, name: str) -> Observed:
    def stage_class(base: Any) -> Any:
        class Scaled(base):  # type: ignore[misc]
            def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward_maybe_with_nosync(*args, **kwargs) * 0.5

        return Scaled

    case = Case(package, name, stage_class)
    case.step(case.schedule())
    return case.found()


def steps_of_a_subclass(package: str) -> Observed:
    """GPipe with the calls in a loop of its own."""

    def own(base: Any) -> Any:
        class ByHand(base):  # type: ignore[misc]
            def _step_microbatches(
                self,
                arg_mbs: Any = None,
                kwarg_mbs: Any = None,
                target_mbs: Any = None,
                *rest: Any,
                **options: Any,
            ) -> None:
                arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs)
                first = None if target_mbs is None else target_mbs[0]
                self._initialize_stage(arg_mbs[0], kwarg_mbs[0], first)
                stage, batched, sends = self._stage, case.schedules._batch_p2p, []
                for k in range(M):
                    case.schedules._wait_batch_p2p(batched(stage.get_fwd_recv_ops(k)))
                    output = stage.forward_one_chunk(k, arg_mbs[k], kwarg_mbs[k])
                    sends.append(batched(stage.get_fwd_send_ops(k)))
                    self._maybe_compute_loss(stage, output, target_mbs, k)
                for k in range(M):
                    case.schedules._wait_batch_p2p(batched(stage.get_bwd_recv_ops(k)))
                    stage.backward_one_chunk(k, loss=self._maybe_get_loss(stage, k), last_backward=k == M - 1)
                    sends.append(batched(stage.get_bwd_send_ops(k)))
                for each in sends:
                    case.schedules._wait_batch_p2p(each)
                self._update_losses(stage, options.get("losses", rest[0] if rest else None))
                stage.scale_grads(M)

        return ByHand

    case = Case(package, "GPipe")
    case.step(case.schedule(own))
    return case.found(case.output)


def steps_of_a_subclass_that_calls_super(package: str) -> Observed:
    seen: list[int] = []

    def own(base: Any) -> Any:
        class Logged(base):  # type: ignore[misc]
            def _step_microbatches(self, arg_mbs: Any = None, *rest: Any, **options: Any) -> None:
                seen.append(len(arg_mbs))
                super()._step_microbatches(arg_mbs, *rest, **options)

        return Logged

    case = Case(package, "Interleaved1F1B")
    case.step(case.schedule(own))
    return case.found((seen, case.output))


def compare() -> list[str]:
    """The scripts with torch and with ours; gives the names of those that differ."""
    scripts: dict[str, Callable[[str], Observed]] = {
        "loss of a subclass": loss_of_a_subclass,
        "loss replaced": loss_replaced_after_a_step,
        "merged outputs": outputs_merged_by_a_subclass,
        "methods, 1F1B": lambda package: methods_of_a_subclass(package, "1F1B"),
        "methods, zero bubble": lambda package: methods_of_a_subclass(package, "InterleavedZeroBubble"),
        "forward, GPipe": lambda package: forward_of_a_subclass(package, "GPipe"),
        "forward, ZBV": lambda package: forward_of_a_subclass(package, "ZBVZeroBubble"),
        "own steps": steps_of_a_subclass,
        "own steps with super": steps_of_a_subclass_that_calls_super,
    }
    different = []
    for name, script in scripts.items():
        wanted, found = script("torch.distributed.pipelining"), script(OURS)
        try:
            torch.testing.assert_close(found, wanted)
        except AssertionError as error:
            different.append(f"{name}: {error}")
    return different


# --- refused ----------------------------------------------------------------------------------------


def _refusal(
    change: Callable[[Case, Any], None],
    stage_class: Callable[[Any], Any] | None = None,
    schedule_class: Callable[[Any], Any] = lambda base: base,
) -> str:
    """The error of a step after a change on the last rank, or of a first step with this class."""
    case = Case(OURS, "GPipe", stage_class or (lambda base: base))
    schedule = case.schedule(schedule_class)
    dist.barrier()
    if stage_class is None and change is not _nothing:
        case.step(schedule)
        dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        change(case, schedule)
    try:
        case.step(schedule)
    except ValueError as error:
        return str(error)
    return "no error"


def _silent(base: Any) -> Any:
    class Silent(base):  # type: ignore[misc]
        def forward_one_chunk(self, *_: Any, **__: Any) -> Any:
            return torch.zeros(2, 8)

    return Silent


def _scaling(base: Any) -> Any:
    class Scaling(base):  # type: ignore[misc]
        def scale_grads(self, grad_scale_factor: int) -> None:
            pass

    return Scaling


def refusals() -> list[str]:
    """What each rank says of changes that would be ignored."""

    def replace_submodule(case: Case, _schedule: Any) -> None:
        case.stages[0].submod = nn.Linear(8, 8)

    def patch(case: Case, _schedule: Any) -> None:
        case.stages[0].forward_one_chunk = lambda *_, **__: None

    def remove_loss(_case: Case, schedule: Any) -> None:
        schedule._loss_fn = None

    def change_scale(_case: Case, schedule: Any) -> None:
        schedule.scale_grads = False

    def defer(case: Case, _schedule: Any) -> None:
        case.stages[0].dw_builder = lambda: lambda: None

    return [
        _refusal(replace_submodule),
        _refusal(patch),
        _refusal(remove_loss),
        _refusal(change_scale),
        _refusal(defer),
        _refusal(_nothing, _silent),
        _refusal(_nothing, _scaling),
        _refusal(_nothing, schedule_class=_computing),
    ]


def _nothing(_case: Case, _schedule: Any) -> None:
    pass


def _computing(base: Any) -> Any:
    class Computing(base):  # type: ignore[misc]
        def _maybe_compute_loss(self, *_: Any) -> None:
            pass

    return Computing


def forward_orders() -> tuple[str, str]:
    """A step of an order without backwards that has a loss; then an evaluation."""
    from penstock.pipelining.schedules import F, PipelineScheduleMulti, _Action  # noqa: PLC0415

    case = Case(OURS, "Interleaved1F1B")
    schedule: Any = PipelineScheduleMulti(case.stages, M, loss_fn=functional.mse_loss)
    schedule.pipeline_order = {
        rank: [_Action(stage, F, k) for stage in (rank, rank + 2) for k in range(M)] for rank in range(2)
    }
    message = ""
    try:
        case.step(schedule)
    except AssertionError as error:
        message = str(error)
    x, _ = batch(0, ROWS * M)
    output = schedule.eval(*((x,) if 0 in case.parts else ()))
    return message, "" if output is None else str(tuple(output.shape))
