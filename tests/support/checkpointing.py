"""A model with names, split and sharded in several ways, trained from a checkpoint or from the beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

from penstock import build
from penstock.runtime import Pipeline, load_checkpoint, save_checkpoint, split
from tests.support.models import TASKS, WIDTH, squared
from tests.support.reference import TIMEOUT, split_plainly

Bits: TypeAlias = tuple[str, tuple[int, ...], bytes]
M = 8


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model: a family of schedules, or a plain module, sharded or not."""

    family: str = ""
    stages: int = 1
    sharded: bool = False
    tensor_parallel: bool = False


@dataclass
class Found:
    """What a rank has in the end: losses, the model by name, the optimizer by name and key, and `extra`."""

    losses: list[float]
    model: dict[str, Bits]
    optimizer: dict[str, Bits]
    extra: Any = None


def named_model() -> Any:
    """Seven blocks and a head; the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = [
            nn.Sequential(OrderedDict(lin=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH), act=nn.Tanh()))
            for _ in range(7)
        ]
        return nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks), head=nn.Linear(WIDTH, WIDTH)))


def stages_of(count: int) -> dict[int, nn.Module]:
    starts = [f"layers.{8 * stage // count}" for stage in range(1, count)]
    return split(named_model(), ["head" if name == "layers.7" else name for name in starts])


def sharded(model: Any, *, tensor_parallel: bool) -> Any:
    """Over all ranks, or over two with the layers sharded over two others."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (ranks // 2, 2) if tensor_parallel else (ranks, 1), mesh_dim_names=("dp", "tp")
    )
    if tensor_parallel:
        for block in model.layers.children():
            parallelize_module(block, mesh["tp"], {"lin": ColwiseParallel(output_layouts=Replicate())})
    for block in model.layers.children():
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def optimizer_for(name: str, parameters: Any) -> Optimizer:
    kinds: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}
    options: dict[str, Any] = {"adamw": {}, "sgd": {"momentum": 0.9}}[name]
    optimizer: Optimizer = kinds[name](parameters, **options)
    return optimizer


def bits(tensor: Tensor) -> Bits:
    """A tensor to the last bit, as a value that can be compared and sent."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(whole.dtype), tuple(whole.shape), bytes(flat.tolist())


def bits_of_model(modules: Mapping[int, nn.Module]) -> dict[str, Bits]:
    return {name: bits(value) for module in modules.values() for name, value in module.state_dict().items()}


def bits_of_optimizer(optimizer: Optimizer, modules: Mapping[int, nn.Module]) -> dict[str, Bits]:
    found: dict[str, Bits] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters():
            state = optimizer.state.get(parameter, {})
            found |= {f"{name} {key}": bits(value) for key, value in state.items() if isinstance(value, Tensor)}
    return found


def train(
    layout: Layout, optimizer_name: str, steps: range, load: str | None = None, save: str | None = None
) -> Found:
    """Make everything new, load, take the steps, save."""
    with ExitStack() as until:
        model: Pipeline | nn.Module
        if layout.family:
            schedule = build(layout.family, ranks=dist.get_world_size(), microbatches=M)
            model = until.enter_context(
                closing(Pipeline(stages_of(layout.stages), schedule, loss=squared, timeout=TIMEOUT))
            )
            modules = model.modules
        else:
            plain = named_model()
            whole = sharded(plain, tensor_parallel=layout.tensor_parallel) if layout.sharded else plain
            model, modules = whole, {0: whole}
        scrambled = 0.0 if load is None else 1.0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scrambled)
        optimizer = optimizer_for(optimizer_name, model.parameters())
        optimizer.param_groups[0]["lr"] = 0.02 if load is None else 99.0
        extra = None if load is None else load_checkpoint(load, model, optimizer)
        found = Found([], bits_of_model(modules), bits_of_optimizer(optimizer, modules), extra)
        for step in steps:
            batch = TASKS["mlp"].batch(step, M, torch.float32)
            if isinstance(model, Pipeline):
                loss = model.step(*batch.args, target=batch.target).loss
                assert loss is not None
                found.losses.append(loss)
            else:
                found.losses.append(_step_plainly(model, batch.args[0], batch.target))
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            save_checkpoint(save, model, optimizer, extra={"step": steps.stop})
            found.model, found.optimizer = bits_of_model(modules), bits_of_optimizer(optimizer, modules)
        return found


def _step_plainly(model: nn.Module, x: Tensor, y: Tensor) -> float:
    total = 0.0
    for part, target in zip(split_plainly(x, M), split_plainly(y, M)):
        loss = squared(model(part), target) / M
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss)
    return total


def together(found: list[Found]) -> Found:
    """What all ranks have; of what several have, the first one's."""
    whole = Found(found[0].losses, {}, {}, found[0].extra)
    for each in reversed(found):
        whole.model |= each.model
        whole.optimizer |= each.optimizer
    return whole
