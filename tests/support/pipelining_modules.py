"""Traced, compiled, sharded and other modules under torch's schedules, as functions that run on every rank."""

from __future__ import annotations

import importlib
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
    Run,
    batch,
    gradients_of,
    loop,
    modules,
    own_stages,
    stages_of,
    style,
)
from tests.support.reference import differences


def train_traced() -> Run:
    """The stages of a traced pipe."""
    from penstock.pipelining import ScheduleGPipe, SplitPoint, pipeline  # noqa: PLC0415

    rank = dist.get_rank()
    whole = nn.Sequential(*modules(4))
    pipe = pipeline(
        whole, mb_args=(torch.zeros(ROWS, 8),), split_spec={str(i): SplitPoint.BEGINNING for i in (1, 2, 3)}
    )
    stage = pipe.build_stage(rank, CPU)
    schedule = ScheduleGPipe(stage, 4, loss_fn=functional.mse_loss)
    run = loop(schedule, {rank: stage.submod}, 3, ROWS * 4)
    run.gradients = [
        {
            f"{rank}.{name.split('.', 1)[1]}": grad
            for name, grad in ((k.split(".", 1)[1], v) for k, v in step.items())
        }
        for step in run.gradients
    ]
    return run


class Skips(nn.Module):
    """Each of the last layers also gets the output of its mirror image, and all but two that of the first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        values = [self.layers[0](x)]
        for i, layer in enumerate(self.layers[1:], 1):
            mirrored = len(self.layers) - 1 - i
            skipped = values[mirrored] if mirrored < i - 1 else torch.zeros(())
            values.append(torch.tanh(layer(values[-1])) + skipped + (values[0] if i > 1 else 0))
        result: Tensor = values[-1]
        return result


class SkipsWithSplits(nn.Module):
    """Like an example of torch's tests: it calls pipe_split(), and a value without a gradient skips stages."""

    constant: Tensor

    def __init__(self, _layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("constant", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        from penstock.pipelining import pipe_split  # noqa: PLC0415

        x = torch.mm(x, self.weights[0])
        skipped, constant = x, self.constant.clone()
        x = torch.relu(x)
        pipe_split()  # type: ignore[no-untyped-call]
        x = self.layers[0](torch.mm(x, self.weights[1]))
        pipe_split()  # type: ignore[no-untyped-call]
        x = torch.mm(torch.relu(x) + skipped, self.weights[2]) + constant
        pipe_split()  # type: ignore[no-untyped-call]
        result: Tensor = torch.tanh(self.layers[1](x) + constant + skipped)
        return result


def train_skips(name: str, model: Callable[[int], nn.Module], m: int = 4) -> list[str]:
    """A traced pipe in which values skip stages; gives how its gradients differ from those of one process."""
    from penstock.pipelining import SplitPoint, pipeline  # noqa: PLC0415
    from penstock.pipelining.schedules import get_schedule_class  # noqa: PLC0415

    count = stages_of(name, 4)
    plain, traced = model(count).double(), model(count).double()
    x, y = torch.randn(2, ROWS * m, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spec = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, count)}
    pipe = pipeline(traced, mb_args=(x[:ROWS],), split_spec=spec if model is Skips else None)
    stages = [pipe.build_stage(index, CPU) for index in own_stages(OURS, name)]
    make: Any = get_schedule_class(name)
    schedule = make(stages if count > 4 else stages[0], m, loss_fn=functional.mse_loss)
    for _ in range(2):
        schedule.step(*((x,) if stages[0].is_first else ()), target=y)
        functional.mse_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
    outputs = schedule.eval(*((x,) if stages[0].is_first else ()), target=y)
    wanted = {key: parameter.grad for key, parameter in plain.named_parameters()}
    found = {key: each.grad for stage in stages for key, each in stage.submod.named_parameters()}
    problems = list(
        differences(f"rank {dist.get_rank()}", found, {key: wanted[key] for key in found}, exact=False)
    )
    problems += [] if found else [f"no parameters on rank {dist.get_rank()}"]
    if stages[-1].is_last or stages[0].is_last:
        problems += [] if torch.allclose(outputs, plain(x), rtol=0, atol=1e-12) else ["the output differs"]
    return problems


class View(nn.Module):
    """Gives a view, which torch cannot split the backward of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).t().t()
        return result


def train_wrapped(wrap: Callable[[nn.Module], nn.Module], name: str, m: int = 4) -> Run:
    """With every stage's module wrapped."""
    from penstock.pipelining import PipelineStage  # noqa: PLC0415
    from penstock.pipelining.schedules import get_schedule_class  # noqa: PLC0415

    count = stages_of(name, 4)
    parts = {index: modules(count)[index] for index in own_stages(OURS, name)}
    stages = [PipelineStage(wrap(part), index, count, CPU) for index, part in parts.items()]
    make: Any = get_schedule_class(name)
    return loop(make(stages, m, loss_fn=functional.mse_loss), parts, count - 1, ROWS * m)


def train_views(name: str) -> Run:
    return train_wrapped(View, name)


def compiled(module: nn.Module) -> nn.Module:
    result: Any = torch.compile(module, backend="aot_eager")
    return result  # type: ignore[no-any-return]


def train_compiled(name: str) -> Run:
    return train_wrapped(compiled, name)


# --- weight gradients of one's own ----------------------------------------------------------------

_put_off: list[Callable[[], None]] = []


class PutOff(torch.autograd.Function):
    """x times a weight, whose gradient is computed when the list is emptied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        result: Tensor = x @ layer.weight.detach().t()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer

        def add() -> None:
            found = (gradient.t() @ x).detach()
            layer.weight.grad = found if layer.weight.grad is None else layer.weight.grad + found

        _put_off.append(add)
        return gradient @ layer.weight.detach(), None


class Deferring(nn.Module):
    """A linear layer that puts its weight gradient off."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = PutOff.apply(x, self)  # type: ignore[no-untyped-call]
        return result


def train_with_dw_builder(package: str, name: str, m: int) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients of a step, and what was built and run in which order."""
    pipelining: Any = importlib.import_module(package)
    schedules: Any = importlib.import_module(f"{package}.schedules")
    count, log = stages_of(name, 4), []
    _put_off.clear()

    def builder() -> Callable[[], None]:
        log.append("built")
        taken = _put_off[:]
        _put_off.clear()

        def run() -> None:
            log.append("run")
            for add in taken:
                add()

        return run

    parts: dict[int, nn.Module] = {}
    for index in own_stages(package, name):
        whole: Any = modules(count)[index]
        parts[index] = nn.Sequential(whole[0], nn.Tanh(), Deferring(whole[2].weight))
    like = torch.zeros(ROWS, 8, requires_grad=True)  # or torch tries a backward first, which puts off one more
    stages = [
        pipelining.PipelineStage(part, index, count, CPU, like, like, dw_builder=builder)
        for index, part in parts.items()
    ]
    schedule = schedules.get_schedule_class(name)(stages, m, loss_fn=functional.mse_loss)
    x, y = batch(0, ROWS * m)
    schedule.step(*((x,) if 0 in parts else ()), **({"target": y} if count - 1 in parts else {}))
    return gradients_of(parts.items()), log


# --- with other parallelism -----------------------------------------------------------------------


def train_sharded(name: str) -> tuple[dict[str, Tensor], int]:
    """Stages wrapped by fully_shard on two replicas of two ranks; whole gradients after one step."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from penstock.pipelining import PipelineStage  # noqa: PLC0415
    from penstock.pipelining.schedules import get_schedule_class  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    utilities = importlib.import_module("penstock.pipelining._utils")
    own = utilities.generate_rank_to_stage_mapping(2, 4, style(name))[rank]
    parts = {index: modules(4)[index] for index in own}
    for part in parts.values():
        fully_shard(part, mesh=mesh["dp"])
    group = mesh["pp"].get_group()
    stages = [PipelineStage(part, index, 4, CPU, group=group) for index, part in parts.items()]
    make: Any = get_schedule_class(name)
    schedule = make(stages, 4, loss_fn=functional.mse_loss)
    x, y = batch(replica, 8)
    schedule.step(*((x,) if 0 in parts else ()), **({"target": y} if 3 in parts else {}))
    whole = {
        f"{index}.{key}": parameter.grad.full_tensor()
        for index, part in parts.items()
        for key, parameter in part.named_parameters()
    }
    return whole, replica
