"""Scripts for torch.distributed.pipelining that override or replace parts of it; the package is a parameter."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock.runtime.dtensors import whole
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

__all__ = ["Case", "compare", "with_replicas"]

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


def with_replicas(kind: str) -> list[float]:
    """How far the gradients of replicas or shards are off if a stage overrides methods."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, ours = mesh.get_local_rank("pp"), importlib.import_module(OURS)

    def train(make: Any) -> list[Tensor]:
        parts = {index: modules(4)[index] for index in (rank, rank + 2)}
        for index, part in parts.items():
            if kind == "DDP":
                parts[index] = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
            else:
                fully_shard(part, mesh=mesh["dp"])
        stages = [make(part, index, 4, CPU, group=mesh.get_group("pp")) for index, part in parts.items()]
        schedule = ours.ScheduleInterleavedZeroBubble(stages, M, loss_fn=functional.mse_loss)
        x, y = batch(mesh.get_local_rank("dp"), ROWS * M)
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
        return [whole(p.grad) for part in parts.values() for p in part.parameters() if p.grad is not None]

    wanted, found = train(ours.PipelineStage), train(_passing(ours.PipelineStage))
    return [float((one - other).abs().max()) for one, other in zip(wanted, found, strict=True)]


def _passing(base: Any) -> Any:
    class Passing(base):  # type: ignore[misc]
        def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
            return super().forward_one_chunk(*args, **options)

        def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
            return super().backward_one_chunk(*args, **options)

        def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_maybe_with_nosync(*args, **kwargs)

        def perform_reduce_grad(self, grad_scale_factor: int) -> Any:
            return super().perform_reduce_grad(grad_scale_factor)

    return Passing
