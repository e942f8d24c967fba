"""Promise: parameters that change between steps are reduced, and replicas that differ are rejected."""

from __future__ import annotations

from contextlib import closing, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock import build
from penstock.runtime import Pipeline
from tests.support.linear_stages import WIDTH, linear, mesh_of_four, message_of, numbers, pipeline_of
from tests.support.pool import Pools


def differing_parameters(module: nn.Module, mesh: DeviceMesh) -> list[str]:
    """The parameters whose gradients differ between replicas."""
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
        return differing_parameters(module, mesh)


@pytest.mark.parametrize("change", ["unfrozen", "replaced"])
@pytest.mark.parametrize("data", ["replicas", "ddp"])
def test_parameters_unfrozen_or_replaced_later_are_reduced(pools: Pools, data: str, change: str) -> None:
    assert pools(4).run(changed_later, data, change) == [[]] * 4


def stale_parameters() -> tuple[float, float]:
    """A forward outside of the pipeline leaves FSDP's root unsharded; then its shards change."""
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


def test_stale_unsharded_parameters_are_gathered_again(pools: Pools) -> None:
    for found, right in pools(4).run(stale_parameters):
        assert found == pytest.approx(right, rel=1e-9)


def different_replicas(data: str) -> str:
    """Each replica has another seed."""
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
        return message_of(lambda: pipeline.step(x, target=x))


@pytest.mark.parametrize("data", ["replicas", "hsdp"])
def test_replicas_with_different_values_are_rejected(pools: Pools, data: str) -> None:
    for message in pools(4).run(different_replicas, data):
        assert "replicas must hold the same values" in message
        assert "weight" in message
    pools(4).stop()  # a rank that was still in a collective has aborted its process groups


class HalfUsed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used, self.unused = linear(seed), linear(seed)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def with_unused_module() -> list[str]:
    """Gradients have their own reduce dtype, and a sharded module never runs."""
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


def test_an_unused_sharded_module_needs_no_gradient(pools: Pools) -> None:
    assert pools(4).run(with_unused_module) == [["used.bias", "used.weight"]] * 4


def static_graph() -> str:
    mesh = mesh_of_four()
    wrapped = DistributedDataParallel(linear(0), process_group=mesh.get_group("dp"), static_graph=True)
    return message_of(lambda: pipeline_of(wrapped, mesh).close())


def test_a_ddp_wrapper_that_always_reduces_is_rejected(pools: Pools) -> None:
    assert all("static_graph=True" in message for message in pools(4).run(static_graph))
