"""Promise: batches that are already split run as whole ones, and options that would be ignored are refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PipelineError
from penstock.runtime.dtensors import whole
from tests.support.grids import small
from tests.support.pipelining_overrides import Case
from tests.support.pipelining_scripts import CPU, NAMES, OURS, ROWS, batch, gradients_of, modules
from tests.support.pool import Pools

M = 4
Observed = tuple[list[float], Tensor | None, dict[str, Tensor]]


class Scaled(nn.Module):
    """Takes a keyword of every microbatch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * factor
        return y


def scaled_case(name: str) -> tuple[Case, Any]:
    """A schedule whose stages take a keyword."""
    case = Case(OURS, name)
    case.parts = {index: Scaled(part) for index, part in case.parts.items()}
    make = case.pipelining.PipelineStage
    case.stages = [make(part, index, case.count, CPU) for index, part in case.parts.items()]
    return case, case.schedule()


def both_ways(name: str, call: str) -> list[Observed]:
    """What a step or eval gives for a whole batch, and for its microbatches."""
    x, y = batch(0, ROWS * M)
    factor = torch.arange(1.0, ROWS * M + 1).reshape(-1, 1) / M
    found = []
    for is_split in (False, True):
        case, schedule = scaled_case(name)
        first, last = 0 in case.parts, case.count - 1 in case.parts
        given: dict[str, Any] = {"losses": case.losses} if last else {}
        if is_split:
            given["kwarg_mbs"] = [{"factor": part} for part in factor.chunk(M)]
            given |= {"arg_mbs": [(part,) for part in x.chunk(M)]} if first else {}
            given |= {"target_mbs": list(y.chunk(M))} if last else {}
            output = getattr(schedule, call)(**given)
        else:
            given |= {"target": y} if last else {}
            output = getattr(schedule, call)(*((x,) if first else ()), factor=factor, **given)
        assert schedule._has_backward
        losses = [float(loss) for loss in case.losses]
        found.append((losses, None if output is None else output.detach(), gradients_of(case.parts.items())))
    return found


@pytest.mark.parametrize("call", ["step", "eval"])
@pytest.mark.parametrize("name", NAMES)
@small(lambda name: name in {"GPipe", "ZBVZeroBubble"})
def test_microbatches_run_as_the_batch_that_they_are_split_from(pools: Pools, name: str, call: str) -> None:
    ranks = pools(2).run(both_ways, name, call)
    for (losses, output, gradients), (own_losses, own_output, own_gradients) in ranks:
        assert own_losses == losses
        torch.testing.assert_close(own_output, output)
        assert own_gradients.keys() == gradients.keys()
        assert bool(gradients) == (call == "step")
        for key, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[key], gradient)
    assert sorted(len(losses) for (losses, *_), _ in ranks) == [0, M]


# --- refused ---------------------------------------------------------------------------------------


def rejected_calls() -> list[str]:
    """What each rank says of calls that are wrong on the first rank; then a step trains."""
    x, y = batch(0, ROWS * M)
    args, factors = [(part,) for part in x.chunk(M)], [{"factor": torch.ones(1)} for _ in range(M)]
    case, schedule = scaled_case("GPipe")
    rank, messages = dist.get_rank(), []
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {"kwarg_mbs": factors}),
        ((), {"arg_mbs": args, "factor": torch.ones(1)}),
        ((), {"arg_mbs": args, "kwarg_mbs": factors, "target": y}),
        ((), {"arg_mbs": args[:3], "kwarg_mbs": factors}),
        ((), {"arg_mbs": tuple(args), "kwarg_mbs": factors}),
        ((), {"arg_mbs": list(x.chunk(M)), "kwarg_mbs": factors}),
        ((), {"arg_mbs": args, "kwarg_mbs": [torch.ones(1)] * M}),
        ((), {"arg_mbs": [*args[:3], (x, x)], "kwarg_mbs": factors}),
        ((), {"arg_mbs": args, "kwarg_mbs": [*factors[:3], {}]}),
        ((), {"arg_mbs": args, "kwarg_mbs": [{**each, "target": y} for each in factors]}),
    ]
    right = {"kwarg_mbs": factors, "target_mbs": list(y.chunk(M))}
    for positional, named in calls:
        try:
            schedule.step(*(positional if rank == 0 else ()), **(named if rank == 0 else right))
        except (TypeError, ValueError) as error:  # noqa: PERF203 -- ten of them
            messages.append(f"{type(error).__name__}: {error}")
    schedule.step(**({"arg_mbs": args, "kwarg_mbs": factors} if rank == 0 else right))
    assert gradients_of(case.parts.items())
    return messages


REJECTIONS = [
    ("ValueError", "takes no positional arguments: pass arg_mbs="),
    ("ValueError", "takes no factor: pass kwarg_mbs="),
    ("ValueError", "takes no target: pass target_mbs="),
    ("ValueError", "4 arg_mbs but got 3"),
    ("TypeError", "arg_mbs must be a list"),
    ("TypeError", "arg_mbs[0] must be a tuple (given a Tensor)"),
    ("TypeError", "kwarg_mbs[0] must be a dict (given a Tensor)"),
    ("PipelineError", "arg_mbs[0] has 1 argument, arg_mbs[3] has 2"),
    ("PipelineError", "kwarg_mbs[0] has factor, kwarg_mbs[3] has none"),
    ("PipelineError", "kwarg_mbs has target, which no keyword of a module can be called"),
]


def test_microbatches_that_one_rank_rejects_fail_on_all_and_the_next_step_trains(pools: Pools) -> None:
    for rank, messages in enumerate(pools(2).run(rejected_calls)):
        assert len(messages) == len(REJECTIONS), messages
        for message, (kind, text) in zip(messages, REJECTIONS):
            assert message.startswith("StepFailedError" if rank else kind)
            assert text in message


def refused_options() -> list[str]:
    """The errors of options that would be ignored."""
    messages = []

    def refuse(call: Callable[[], object]) -> None:
        with pytest.raises(PipelineError) as raised:
            call()
        messages.append(str(raised.value))

    case = Case(OURS, "Interleaved1F1B")

    def own(base: Any) -> Any:
        class OwnSteps(base):  # type: ignore[misc]
            def _step_microbatches(self, *_: Any, **__: Any) -> None:
                """Run nothing."""

        return OwnSteps

    refuse(lambda: case.step(case.schedule(own), finalize_gradients=False))
    return messages


def test_options_that_would_be_ignored_are_refused_by_name(pools: Pools) -> None:
    for (own_steps,) in pools(2).run(refused_options):
        assert "finalize_gradients=False would be ignored: OwnSteps" in own_steps


# --- overridden steps and accumulated gradients ----------------------------------------------------


def evaluate_with_an_overridden_step() -> Tensor | None:
    """The output of an eval whose step takes only what torch 2.13 passes."""

    def own(base: Any) -> Any:
        class Older(base):  # type: ignore[misc]
            def step(self, *args: Any, target: Any = None, losses: Any = None, **kwargs: Any) -> Any:
                assert not kwargs
                return super().step(*args, target=target, losses=losses)

        return Older

    case = Case(OURS, "1F1B")
    x, _ = batch(0, ROWS * M)
    output: Tensor | None = case.schedule(own).eval(*((x,) if dist.get_rank() == 0 else ()))
    return output


def test_eval_passes_an_overridden_step_only_what_it_was_given(pools: Pools) -> None:
    first, last = pools(2).run(evaluate_with_an_overridden_step)
    assert first is None
    wanted = nn.Sequential(*modules(2))(batch(0, ROWS * M)[0])
    torch.testing.assert_close(last, wanted.detach())


def wrapped(kind: str, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A module whose gradients are reduced over a mesh, or with "plain" over none."""
    if kind == "DDP":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    if kind == "replicate":
        replicate(part, process_group=mesh.get_group())
    if kind == "fully_shard":
        fully_shard(part, mesh=mesh)
    if kind == "replicate on FSDP":
        replicate_with_fsdp(part, mesh=mesh)
    return part


def accumulate(kind: str) -> tuple[dict[str, Tensor], int]:
    """The gradients of two steps, of which only the second finalizes them."""
    pipelining: Any = importlib.import_module(OURS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    whole_part = modules(2)[rank]
    part = wrapped(kind, whole_part, mesh["dp"])
    stage = pipelining.PipelineStage(part, rank, 2, CPU, group=mesh["pp"].get_group())
    schedule = pipelining.Schedule1F1B(stage, M, loss_fn=functional.mse_loss)
    for step in range(2):
        x, y = batch(2 * step + (0 if kind == "plain" else replica), ROWS * M)
        given = {"target": y} if rank else {}
        schedule.step(*(() if rank else (x,)), **given, finalize_gradients=step == 1)
        waits = kind in ("fully_shard", "replicate on FSDP") and step == 0
        assert all((parameter.grad is None) == waits for parameter in whole_part.parameters())
    return {f"{rank}.{key}": whole(each.grad) for key, each in whole_part.named_parameters()}, replica


@pytest.mark.parametrize("kind", ["fully_shard", "replicate on FSDP", "DDP", "replicate", "plain"])
def test_gradients_are_reduced_by_the_step_that_finalizes_them(pools: Pools, kind: str) -> None:
    """Torch 2.15 divides what is accumulated again in every step, unless the stages are in `fully_shard`."""
    alone = nn.Sequential(*modules(2))
    for number in (0, 2) if kind == "plain" else range(4):
        x, y = batch(number, ROWS * M)
        torch.autograd.backward(functional.mse_loss(alone(x), y) / (1 if kind == "plain" else 2))
    found: dict[str, Tensor] = {}
    for gradients, replica in pools(4).run(accumulate, kind):
        found |= gradients if replica == 0 else {}
    wanted = {key: parameter.grad for key, parameter in alone.named_parameters()}
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient)
