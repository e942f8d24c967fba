"""Training scripts as written for torch.distributed.pipelining; the package they import is a parameter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

TORCH, OURS = "torch.distributed.pipelining", "penstock.pipelining"
WIDTH, ROWS = 8, 2
SINGLE = ("GPipe", "1F1B")
NAMES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CPU = torch.device("cpu")


@dataclass
class Run:
    """What a training showed on one rank: per step the losses, the outputs and the gradients by parameter."""

    losses: list[list[float]] = field(default_factory=list)
    outputs: list[Tensor | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    about: Any = None


def modules(count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        ]


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def style(name: str) -> str:
    return "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"


def stages_of(name: str, ranks: int) -> int:
    return ranks if name in SINGLE else 2 * ranks


def own_stages(package: str, name: str) -> list[int]:
    """The stages of this rank."""
    ranks = dist.get_world_size()
    utils = importlib.import_module(f"{package}._utils")
    mapping = utils.generate_stage_to_rank_mapping(ranks, stages_of(name, ranks), style(name))
    return [stage for stage, rank in mapping.items() if rank == dist.get_rank()]


def gradients_of(made: Iterable[tuple[int, nn.Module]]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.grad.clone()
        for index, module in made
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


# --- the loop --------------------------------------------------------------------------------------


def loop(schedule: Any, parts: dict[int, nn.Module], last: int, rows: int, steps: int = 2) -> Run:
    """A training loop in the manner of torchtitan."""
    run = Run()
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch(step, rows)
        optimizer.zero_grad()
        has_first, has_last = 0 in parts, last in parts
        losses: list[Tensor] | None = [] if has_last else None
        target = targets if has_last else None
        if has_first:
            output = schedule.step(inputs, target=target, losses=losses)
        else:
            output = schedule.step(target=target, losses=losses)
        assert (output is not None) == has_last
        if losses is not None:
            mean = torch.mean(torch.stack(losses).detach())
            assert torch.isfinite(mean)
        run.losses.append([float(loss.detach()) for loss in losses or []])
        run.outputs.append(None if output is None else output.detach().clone())
        run.gradients.append(gradients_of(parts.items()))
        optimizer.step()
    return run


def train(package: str, name: str, m: int, rows: int | None = None, **options: Any) -> Run:
    """Make stages and a schedule, and train."""
    pipelining, schedules = importlib.import_module(package), importlib.import_module(f"{package}.schedules")
    count = stages_of(name, dist.get_world_size())
    parts = {index: modules(count)[index] for index in own_stages(package, name)}
    stages = [pipelining.PipelineStage(part, index, count, CPU) for index, part in parts.items()]
    make = schedules.get_schedule_class(name)
    first = stages[0] if name in SINGLE else stages
    schedule = make(first, n_microbatches=m, loss_fn=functional.mse_loss, **options)
    return loop(schedule, parts, count - 1, rows or ROWS * m)


def train_custom(make: Callable[[list[Any]], Any], stages: dict[int, int], m: int) -> Run | None:
    """A schedule of one's own over stages on ranks; None on ranks that have none."""
    from penstock.pipelining import PipelineStage  # noqa: PLC0415 -- where the script runs

    ranks = max(stages.values()) + 1
    group = dist.new_group(list(range(ranks)))
    rank = dist.get_rank()
    if rank >= ranks:
        return None
    parts = {index: modules(len(stages))[index] for index in stages if stages[index] == rank}
    made = [PipelineStage(part, index, len(stages), CPU, group=group) for index, part in parts.items()]
    return loop(make(made), parts, len(stages) - 1, ROWS * m)


# --- in one process --------------------------------------------------------------------------------


def train_alone(
    count: int, m: int, rows: int | None = None, steps: int = 2, *, scale_grads: bool = True
) -> Run:
    made, run = modules(count), Run()
    optimizer = torch.optim.SGD([p for module in made for p in module.parameters()], lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch(step, rows or ROWS * m)
        optimizer.zero_grad()
        outputs, losses = [], []
        for x, y in zip(inputs.tensor_split(m), targets.tensor_split(m)):
            outputs.append(nn.Sequential(*made)(x))
            losses.append(functional.mse_loss(outputs[-1], y))
            torch.autograd.backward(losses[-1] / m if scale_grads else losses[-1])
        run.losses.append([float(loss.detach()) for loss in losses])
        run.outputs.append(torch.cat(outputs).detach())
        run.gradients.append(gradients_of(enumerate(made)))
        optimizer.step()
    return run


def assert_alike(ranks: list[Run | None], wanted: Run) -> None:
    """What all ranks found together is what was wanted."""
    there = [run for run in ranks if run is not None]
    for step, losses in enumerate(wanted.losses):
        found = [run.losses[step] for run in there if run.losses[step]]
        assert len(found) == 1
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses))
        outputs = [run.outputs[step] for run in there if run.outputs[step] is not None]
        assert len(outputs) == 1
        torch.testing.assert_close(outputs[0], wanted.outputs[step])
        gradients = {name: grad for run in there for name, grad in run.gradients[step].items()}
        assert gradients.keys() == wanted.gradients[step].keys()
        for name, grad in wanted.gradients[step].items():
            assert torch.allclose(gradients[name], grad, rtol=1e-5, atol=1e-6), f"step {step}: {name}"
