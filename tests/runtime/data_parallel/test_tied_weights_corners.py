"""Promise: tied weights are found however they are declared, and summed exactly once."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from penstock import PenstockError, build
from penstock.runtime import Pipeline, split
from tests.support.grids import small
from tests.support.pool import Pools

WIDTH, M = 4, 2


class Turned(nn.Module):
    """A layer whose weight may be that of another layer, and may have two names."""

    def __init__(self, weight: Tensor | None = None, *, twice: bool = False, seed: int = 0) -> None:
        super().__init__()
        if weight is None:
            weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        if twice:
            self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, self.weight))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(2 * M, WIDTH, generator=generator).double() for _ in range(2))
    return x, y


def alone(layers: list[Turned]) -> list[Turned]:
    """The same layers with the gradients of one process."""
    x, y = batch()
    for xs, ys in zip(x.chunk(M), y.chunk(M)):
        (functional.mse_loss(nn.Sequential(*layers)(xs), ys) / M).backward()  # type: ignore[no-untyped-call]
    return layers


# --- how ties are declared -------------------------------------------------------------------------


def declared_twice(how: str) -> tuple[float, float]:
    """One weight in stages 0, 1 and 3, declared by several ties: by how much gradient and norm are off."""
    rank, shared = dist.get_rank(), nn.Parameter(Turned().weight.detach().clone())

    def layers(one: nn.Parameter | None) -> list[Turned]:
        apart = [Turned(seed=stage) for stage in range(4)]
        for stage in (0, 1, 3):
            apart[stage] = Turned(shared.detach().clone() if one is None else one, twice=True)
        return apart

    stages: Any = [layers(None)[rank]]
    tied: list[dict[int, str]] = [{0: "weight", 1: "weight"}, {1: "weight", 3: "weight"}]
    if how == "shared too":
        stages, tied = dict(enumerate(layers(nn.Parameter(shared.detach().clone())))), tied[:1]
    elif how == "by another name":
        stages = dict(enumerate(layers(nn.Parameter(shared.detach().clone()))))
        tied = [{0: "again", 1: "again", 3: "weight"}]
    right = alone(layers(shared))
    schedule, (x, y) = build("1f1b", ranks=4, microbatches=M), batch()
    with closing(Pipeline(stages, schedule, tied=tied, loss=functional.mse_loss, timeout=120)) as pipeline:
        assert len(pipeline.ties) == 1
        pipeline.step(x, target=y)
        grad, wanted = pipeline.modules[rank].get_parameter("weight").grad, right[rank].weight.grad
        assert grad is not None
        assert wanted is not None
        norm = nn.utils.clip_grad_norm_(nn.Sequential(*right).parameters(), 1e9)
        return float((grad - wanted).abs().max()), abs(float(pipeline.clip_grad_norm_(1e9) - norm))


@pytest.mark.parametrize("how", ["in pairs", "shared too", "by another name"])
def test_a_weight_declared_several_times_is_summed_once(pools: Pools, how: str) -> None:
    for off, off_norm in pools(4).run(declared_twice, how):
        assert off < 1e-12
        assert off_norm < 1e-12


def tied_on_the_first_rank() -> tuple[float, float]:
    """How far the gradient and the norm of a weight are off that only rank 0 has, in both ends of its V."""
    schedule, (x, y) = build("zbv", ranks=2, microbatches=M), batch()
    layers = [Turned(seed=stage) for stage in range(4)]
    layers[3] = Turned(layers[0].weight)
    right = alone([*layers[:3], layers[0]])
    wanted = layers[0].weight.grad
    norm = nn.utils.clip_grad_norm_(nn.Sequential(*right).parameters(), 1e9)
    nn.Sequential(*layers).zero_grad()
    stages = {stage: layers[stage] for stage in schedule.placement.stages_of_rank[dist.get_rank()]}
    with closing(Pipeline(stages, schedule, loss=functional.mse_loss, timeout=120)) as pipeline:
        assert len(pipeline.ties) == (1 if dist.get_rank() == 0 else 0)
        pipeline.step(x, target=y)
        off = abs(float(pipeline.clip_grad_norm_(1e9) - norm))
        if dist.get_rank():
            return 0.0, off
        assert layers[0].weight.grad is not None
        assert wanted is not None
        return float((layers[0].weight.grad - wanted).abs().max()), off


def test_a_weight_tied_on_one_rank_is_known_there_only(pools: Pools) -> None:
    for off, off_norm in pools(2).run(tied_on_the_first_rank):
        assert off < 1e-12
        assert off_norm < 1e-12


def wrapped_after_the_split() -> tuple[dict[int, str], ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    embedding, head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
    head.weight = embedding.weight
    stages = split(nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), head), at=["2"])
    wrapped = DistributedDataParallel(stages[mesh.get_local_rank("pp")], process_group=mesh.get_group("dp"))
    schedule = build("1f1b", ranks=2, microbatches=M)
    with closing(Pipeline([wrapped], schedule, group=mesh["pp"], timeout=120)) as pipeline:
        return tuple(dict(tie) for tie in pipeline.ties)


def test_a_wrapper_does_not_hide_the_tied_weights_of_split(pools: Pools) -> None:
    assert pools(4).run(wrapped_after_the_split) == [({0: "0.weight", 1: "2.weight"},)] * 4


def test_a_module_may_have_its_own_attribute_tied() -> None:
    module = Turned()
    module.tied = True  # type: ignore[assignment]
    with closing(Pipeline([module], build("1f1b", ranks=1, microbatches=M))) as pipeline:
        assert pipeline.ties == ()


def test_two_parameters_of_a_stage_cannot_be_one_tied_weight() -> None:
    pair = nn.Sequential(Turned(), Turned())
    tied = [{0: "weight", 1: "0.weight"}, {0: "weight", 1: "1.weight"}]
    with pytest.raises(PenstockError, match=r"'0.weight' and '1.weight' of stage 1"):
        Pipeline({0: Turned(), 1: pair}, build("zbv", ranks=1, microbatches=M), tied=tied)


def test_every_name_of_a_weight_in_a_stage_is_tied() -> None:
    first, second = Turned(), Turned(twice=True)
    schedule = build("zbv", ranks=1, microbatches=M)
    with closing(Pipeline([first, second], schedule, tied=[{0: "weight", 1: "again"}])):
        assert second.weight is first.weight
        assert second.again is first.weight


def test_a_replaced_tied_layer_is_rejected() -> None:
    stages = [nn.Sequential(Turned()) for _ in range(2)]
    schedule, (x, y) = build("zbv", ranks=1, microbatches=M), batch()
    tied = [{0: "0.weight", 1: "0.weight"}]
    with closing(Pipeline(stages, schedule, tied=tied, loss=functional.mse_loss)) as pipeline:
        pipeline.step(x, target=y)
        stages[1][0] = Turned()
        with pytest.raises(PenstockError, match="no longer one parameter"):
            pipeline.step(x, target=y)


def test_tied_weights_that_are_no_longer_one_parameter_are_rejected() -> None:
    first, second = Turned(), Turned()
    schedule, (x, y) = build("zbv", ranks=1, microbatches=M), batch()
    tied = [{0: "weight", 1: "weight"}]
    with closing(Pipeline([first, second], schedule, tied=tied, loss=functional.mse_loss)) as pipeline:
        second.load_state_dict({"weight": second.weight.detach().clone()}, assign=True)
        with pytest.raises(PenstockError, match="no longer one parameter: 'weight' of stage 0 and 'weight' of"):
            pipeline.step(x, target=y)


# --- what was summed before ------------------------------------------------------------------------


def in_turn(data: str, turns: str) -> float:
    """How often the gradient of one step is in the sum: s steps, a accumulates, 0 sets to zero, n to None."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    module: nn.Module = Turned()
    if data == "fsdp":
        fully_shard(module, mesh=mesh["dp"])
    given: dict[str, Any] = {"replicas": mesh["dp"]} if data == "replicas" else {}
    tied, schedule, (x, y) = [{0: "weight", 1: "weight"}], build("1f1b", ranks=2, microbatches=M), batch()
    given |= {"loss": functional.mse_loss, "group": mesh["pp"], "timeout": 15.0}
    with closing(Pipeline([module], schedule, tied=tied, **given)) as pipeline:
        for turn in turns:
            if turn in "0n":
                module.zero_grad(set_to_none=turn == "n")
                continue
            with pipeline.accumulate() if turn == "a" else nullcontext():
                pipeline.step(x, target=y)
        grad: Any = module.get_parameter("weight").grad
        weight = nn.Parameter(Turned().weight.detach().clone())
        alone([Turned(weight), Turned(weight)])
        assert weight.grad is not None
        whole = grad.full_tensor() if data == "fsdp" else grad
        return round(float(whole.norm() / weight.grad.norm()), 9)


@pytest.mark.parametrize(
    ("data", "turns", "times"),
    [
        ("fsdp", "ss", 2),
        ("fsdp", "sas", 3),
        ("fsdp", "saasns", 1),
        ("replicas", "sas", 3),
        ("replicas", "sa0s", 1),
        ("replicas", "sans", 1),
    ],
)
@small(lambda turns: turns in {"saasns", "sas"})
def test_earlier_sums_are_neither_lost_nor_counted_twice(
    pools: Pools, data: str, turns: str, times: int
) -> None:
    assert pools(4).run(in_turn, data, turns) == [times] * 4
