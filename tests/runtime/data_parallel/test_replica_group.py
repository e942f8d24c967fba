"""Promise: replicas without tokens, and stages that train only a loss, take part."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from penstock import PipelineError, build
from penstock.runtime import GradScaler, Pipeline
from tests.support.composed_model import PADDING, Composed, batch_of, count_tokens, stages_of
from tests.support.composed_model import loss as next_word
from tests.support.composition import gradients, pipeline_of, replica_index
from tests.support.grids import small
from tests.support.meshes import mesh_of_ranks
from tests.support.pool import Pools

SCHEDULE = build("1f1b", ranks=2, microbatches=2)


def without_tokens(data: str) -> list[str]:
    """Replica 1 has nothing that counts."""
    case = Composed(build("zbv", ranks=2, microbatches=4), data, 2, tokens=True)
    x, y = batch_of(case, 0, 0)
    y.chunk(2)[1].fill_(PADDING)
    model = nn.Sequential()
    for stage in stages_of(case, 4).values():
        for name, child in stage.named_children():
            model.add_module(name, child)
    pieces = [piece for piece in zip(x.chunk(8), y.chunk(8)) if count_tokens(piece[1])]
    shares = [next_word(model(xs), ys) * count_tokens(ys) / count_tokens(y) for xs, ys in pieces]
    right = torch.stack(shares).sum()
    right.backward()  # type: ignore[no-untyped-call]
    pipeline, mesh = pipeline_of(case)
    problems = []
    with closing(pipeline):
        place = replica_index(case, mesh)
        found = pipeline.step(x.chunk(2)[place], target=y.chunk(2)[place]).loss
        if found is None or abs(found - float(right)) > 1e-9:
            problems.append(f"loss {found}, not {float(right)}")
        for name, gradient in gradients(pipeline):
            wanted = model.get_parameter(name).grad
            assert wanted is not None
            if not torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12):
                problems.append(f"{name} is off by {float((gradient - wanted).abs().max())}")
    return problems


@pytest.mark.parametrize("data", ["fsdp", "replicas", "ddp"])
@small(lambda data: data != "fsdp")
def test_a_replica_without_tokens_takes_part_with_weight_zero(pools: Pools, data: str) -> None:
    assert pools(4).run(without_tokens, data) == [[]] * 4


class Scaled(nn.Module):
    """A loss with something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * self.scale, target)


def only_a_loss(*, says_so: bool) -> str:
    """The last stage has no parameters, the first is sharded, and the loss is trained."""
    mesh = mesh_of_ranks(pp=2, dp=2)
    torch.manual_seed(1)
    first = nn.Linear(3, 3).double()
    alone = nn.Linear(3, 3).double()
    alone.load_state_dict(first.state_dict())
    x, y = (torch.randn(8, 3, dtype=torch.float64) for _ in range(2))
    mine: Any = fully_shard(first, mesh=mesh["dp"]) if mesh.get_local_rank("pp") == 0 else nn.Tanh()
    given: dict[str, Any] = {"replicas": mesh["dp"]} if says_so else {}
    loss, right_loss = Scaled(), Scaled()
    try:
        pipeline = Pipeline([mine], SCHEDULE, loss=loss, group=mesh["pp"], timeout=120, **given)
    except PipelineError as error:
        return str(error)
    right = right_loss(torch.tanh(alone(x)), y)
    right.backward()
    with closing(pipeline):
        place = mesh.get_local_rank("dp")
        found = pipeline.step(x.chunk(2)[place], target=y.chunk(2)[place]).loss
        assert found == pytest.approx(float(right), rel=1e-12)
        norm = float(pipeline.clip_grad_norm_(1e9))
        everything = [*alone.parameters(), *right_loss.parameters()]
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(everything, 1e9)), rel=1e-12)
        if pipeline.rank == 1:
            assert list(pipeline.parameters()) == [loss.scale]
            torch.testing.assert_close(loss.scale.grad, right_loss.scale.grad, rtol=1e-12, atol=0)
    return "trained"


def _says_so() -> str:
    return only_a_loss(says_so=True)


def _says_nothing() -> str:
    return only_a_loss(says_so=False)


def test_a_loss_is_trained_with_the_last_stage(pools: Pools) -> None:
    assert pools(4).run(_says_so) == ["trained"] * 4


def test_a_last_stage_without_its_replicas_is_rejected(pools: Pools) -> None:
    for message in pools(4).run(_says_nothing):
        assert "replicas of its stages: rank 0: 2; rank 1: 1 (give replicas= if there are more)" in message


def in_inference_mode() -> list[bool]:
    case = Composed(build("zbv", ranks=2, microbatches=4), "fsdp", 2)
    pipeline, mesh = pipeline_of(case)
    x, y = (all_.chunk(2)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
    with closing(pipeline):
        with torch.inference_mode():
            before = pipeline.eval(x, target=y).loss
        trained = pipeline.step(x, target=y).loss
        scaler = GradScaler(pipeline)
        with pipeline.accumulate():
            pipeline.step(x, target=y)
        try:
            scaler.unscale_(torch.optim.SGD(pipeline.parameters(), lr=0.1))
        except PipelineError as error:
            return [before == pytest.approx(trained, rel=1e-12), "accumulate()" in str(error)]
    return []


def test_eval_in_inference_mode_is_harmless_and_unscaling_needs_reduced_gradients(pools: Pools) -> None:
    assert pools(4).run(in_inference_mode) == [[True, True]] * 4
