"""Promises of composition at its corners: what is rarely set up, and would be wrong without a word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock import PenstockError, build
from penstock.runtime import GradScaler, Pipeline
from tests.support.pool import Pools

WIDTH = 4
SCHEDULE = build("1f1b", ranks=2, microbatches=2)


def mesh_of_four(inner: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", inner))


def linear(seed: int, outputs: int = WIDTH) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, outputs).double()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def pipeline_of(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Pipeline:
    given = {"loss": functional.mse_loss, "group": mesh["pp"], "timeout": 15.0, **options}
    return Pipeline([module], SCHEDULE, **given)


def told_by(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return str(error)
    return ""


# --- parameters that change while the pipeline lives -----------------------------------------------


def unlike_replicas(module: nn.Module, mesh: DeviceMesh) -> list[str]:
    """The parameters whose gradients are not the same in all replicas."""
    found = []
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        both = [torch.zeros_like(parameter.grad) for _ in range(2)]
        dist.all_gather(both, parameter.grad, group=mesh.get_group("dp"))
        if not torch.equal(*both):
            found.append(name)
    return found


def changed_later(data: str, change: str) -> list[str]:
    mesh = mesh_of_four()
    inner = nn.Sequential(linear(0), linear(1))
    inner[0].requires_grad_(change != "unfrozen")
    module: nn.Module = inner
    if data == "ddp":
        module = DistributedDataParallel(inner, process_group=mesh.get_group("dp"))
    x = numbers(mesh.get_local_rank("dp"), 4, WIDTH)
    replicas = mesh["dp"] if data == "replicas" else None
    with closing(pipeline_of(module, mesh, replicas=replicas)) as pipeline:
        pipeline.step(x, target=x)
        if change == "replaced":
            inner.load_state_dict(
                {name: value.clone() for name, value in inner.state_dict().items()}, assign=True
            )
        inner.requires_grad_(True)  # noqa: FBT003 -- torch's
        inner.zero_grad()
        pipeline.step(x, target=x)
        return unlike_replicas(module, mesh)


@pytest.mark.parametrize("change", ["unfrozen", "replaced"])
@pytest.mark.parametrize("data", ["replicas", "ddp"])
@pytest.mark.xdist_group("ranks-4")
def test_parameters_that_are_unfrozen_or_replaced_later_are_reduced_too(
    pools: Pools, data: str, change: str
) -> None:
    assert pools(4).run(changed_later, data, change) == [[]] * 4


def left_whole() -> tuple[float, float]:
    """A forward outside of the pipeline leaves FSDP's root whole; then its shards change."""
    mesh = mesh_of_four()
    module = linear(mesh.get_local_rank("pp"))
    fully_shard(module, mesh=mesh["dp"])
    x = numbers(0, 4, WIDTH)
    alone = nn.Sequential(linear(0), linear(1))
    with closing(pipeline_of(module, mesh)) as pipeline, torch.no_grad():
        shards = list(pipeline.parameters())
        module(x)
        for parameter in (*shards, *alone.parameters()):
            parameter.fill_(0.5)
        with torch.enable_grad():
            loss = pipeline.step(x, target=x).loss
        assert loss is not None
        return loss, float(functional.mse_loss(alone(x), x))


@pytest.mark.xdist_group("ranks-4")
def test_parameters_that_were_left_whole_are_gathered_again(pools: Pools) -> None:
    for found, right in pools(4).run(left_whole):
        assert found == pytest.approx(right, rel=1e-9)


def different_replicas(data: str) -> str:
    """Each replica is made from a seed of its own."""
    mesh = (
        mesh_of_four()
        if data == "replicas"
        else init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    )
    torch.manual_seed(dist.get_rank())
    module, x = nn.Linear(WIDTH, WIDTH), torch.ones(4, WIDTH)
    if data == "replicas":
        pipeline = pipeline_of(module, mesh, replicas=mesh["dp"])
    else:
        fully_shard(module, mesh=mesh["replicate", "shard"])
        pipeline = Pipeline(
            [module], build("1f1b", ranks=1, microbatches=2), loss=functional.mse_loss, group=mesh["pp"]
        )
    with closing(pipeline):
        return told_by(lambda: pipeline.step(x, target=x))


@pytest.mark.parametrize("data", ["replicas", "hsdp"])
@pytest.mark.xdist_group("ranks-4")
def test_replicas_that_start_from_different_numbers_are_refused(pools: Pools, data: str) -> None:
    for told in pools(4).run(different_replicas, data):
        assert "replicas must hold the same numbers" in told
        assert "weight" in told


class HalfUsed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used, self.unused = linear(seed), linear(seed)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def with_unused_module() -> list[str]:
    """Gradients are summed in a type of their own, and a sharded module is never called."""
    mesh = mesh_of_four()
    module = HalfUsed(mesh.get_local_rank("pp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for part in (module.used, module.unused, module):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
    x = numbers(0, 4, WIDTH)
    with closing(pipeline_of(module, mesh, loss=lambda y, target: (y.double() - target).sum())) as pipeline:
        for reduces in (False, True):
            with nullcontext() if reduces else pipeline.accumulate():
                pipeline.step(x, target=x)
        return sorted(name for name, parameter in module.named_parameters() if parameter.grad is not None)


@pytest.mark.xdist_group("ranks-4")
def test_a_sharded_module_that_is_never_used_needs_no_gradient(pools: Pools) -> None:
    assert pools(4).run(with_unused_module) == [["used.bias", "used.weight"]] * 4


def static_graph() -> str:
    mesh = mesh_of_four()
    wrapped = DistributedDataParallel(linear(0), process_group=mesh.get_group("dp"), static_graph=True)
    return told_by(lambda: pipeline_of(wrapped, mesh).close())


@pytest.mark.xdist_group("ranks-4")
def test_a_wrapper_that_cannot_hold_its_reductions_back_is_refused(pools: Pools) -> None:
    assert all("static_graph=True" in told for told in pools(4).run(static_graph))


# --- norms and scales ------------------------------------------------------------------------------


def norms_of_uneven_shards() -> list[tuple[float, float]]:
    """The weights of the second stage have one row, so one of two ranks has nothing of them."""
    mesh, x, y = mesh_of_four(), numbers(0, 4, WIDTH), numbers(1, 4, 1)
    module = linear(0) if mesh.get_local_rank("pp") == 0 else linear(1, 1)
    fully_shard(module, mesh=mesh["dp"])
    alone = nn.Sequential(linear(0), linear(1, 1))
    functional.mse_loss(alone(x), y).backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(module, mesh)) as pipeline:
        pipeline.step(x, target=y)
        return [
            (
                float(pipeline.clip_grad_norm_(1e9, kind)),
                float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9, kind)),
            )
            for kind in (2.0, torch.inf, -torch.inf, -1.0, 0.0)
        ]


@pytest.mark.xdist_group("ranks-4")
def test_a_rank_without_a_part_of_a_weight_takes_part_in_every_norm(pools: Pools) -> None:
    for answer in pools(4).run(norms_of_uneven_shards):
        for found, right in answer:
            assert found == pytest.approx(right, rel=1e-9)


class Block(nn.Module):
    """As in a transformer: a norm whose rows are shared out, and two linear layers that are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH).double(), linear(seed, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Scattered(nn.Module):
    """Whole batches become DTensors."""

    def __init__(self, block: Block, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.mesh = block, mesh

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        result: Tensor = self.block(x)
        return result


def sequence_parallel() -> tuple[float, float]:
    mesh, x = mesh_of_four("tp"), numbers(0, 4, 6, WIDTH)
    alone = nn.Sequential(Block(0), Block(1))
    block = Block(mesh.get_local_rank("pp"))
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(block, mesh["tp"], plan)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y.full_tensor() if isinstance(y, DTensor) else y, target)

    for part in x.chunk(2):
        (loss(alone(part), part) / 2).backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(Scattered(block, mesh["tp"]), mesh, loss=loss)) as pipeline:
        pipeline.step(x, target=x)
        return float(pipeline.clip_grad_norm_(0.1)), float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))


@pytest.mark.xdist_group("ranks-4")
def test_gradients_of_sequence_parallel_norms_are_in_the_norm(pools: Pools) -> None:
    for found, right in pools(4).run(sequence_parallel):
        assert found == pytest.approx(right, rel=1e-9)


def test_a_scaler_that_is_switched_off_takes_the_place_of_one_before_it() -> None:
    module, x = linear(0), numbers(0, 4, WIDTH)
    with closing(
        Pipeline([module], build("1f1b", ranks=1, microbatches=2), loss=functional.mse_loss)
    ) as pipeline:
        pipeline.step(x, target=x)
        assert module.weight.grad is not None
        plain = module.weight.grad.clone()
        module.zero_grad()
        GradScaler(pipeline, init_scale=4.0)
        GradScaler(pipeline, enabled=False)
        pipeline.step(x, target=x)
        assert torch.equal(module.weight.grad, plain)


@pytest.mark.parametrize("finite", [True, False])
def test_a_fused_optimizer_is_told_of_an_overflow(finite: bool) -> None:  # noqa: FBT001 -- a parameter of the test
    module, x = linear(0), numbers(0, 4, WIDTH)
    with closing(
        Pipeline([module], build("1f1b", ranks=1, microbatches=2), loss=functional.mse_loss)
    ) as pipeline:
        scaler = GradScaler(pipeline, init_scale=4.0)
        optimizer = torch.optim.Adam(pipeline.parameters(), fused=True)
        before = module.weight.detach().clone()
        pipeline.step(x, target=x)
        assert module.bias.grad is not None
        if not finite:
            module.bias.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, module.weight) is not finite
        assert scaler.get_scale() == (4.0 if finite else 2.0)
