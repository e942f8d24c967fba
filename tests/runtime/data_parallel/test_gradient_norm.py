"""Promise: norms, clipping, scaling and accumulation of the gradients of all ranks are those of one process."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import PipelineError, build
from penstock.runtime import GradScaler, Pipeline
from penstock.runtime.dtensors import local
from tests.support.composed_model import Composed, batch_of, loss, stages_of
from tests.support.composition import gradients, pipeline_of, replica_index
from tests.support.grids import small
from tests.support.meshes import mesh_of_ranks
from tests.support.pool import Pools

ZBV = build("zbv", ranks=2, microbatches=4)
NORMS = (2.0, 1.0, 3.0, torch.inf, -torch.inf, 0.0)


def step(pipeline: Pipeline, case: Composed, mesh: Any, number: int = 0) -> float:
    x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, number, 0))
    found = pipeline.step(x, target=y).loss
    assert found is not None
    return found


def alone(case: Composed) -> nn.Module:
    """One process with the gradients of the first batch."""
    model = nn.Sequential()
    for stage in stages_of(case, case.schedule.num_stages).values():
        for name, child in stage.named_children():
            model.add_module(name, child)
    x, y = batch_of(case, 0, 0)
    pieces = case.schedule.microbatches * case.replicas
    for xs, ys in zip(x.chunk(pieces), y.chunk(pieces)):
        (loss(model(xs), ys) / pieces).backward()  # type: ignore[no-untyped-call]
    return model


def norms(case: Composed) -> list[tuple[float, float]]:
    """Of every kind: the pipeline's, and that of one process."""
    pipeline, mesh = pipeline_of(case)
    model = alone(case)
    with closing(pipeline):
        step(pipeline, case, mesh)
        return [
            (
                float(pipeline.clip_grad_norm_(1e9, kind)),
                float(nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind)),
            )
            for kind in NORMS
        ]


@pytest.mark.parametrize(
    "case",
    [
        Composed(build("1f1b", ranks=4, microbatches=4), tied=True),
        Composed(ZBV, "fsdp", 2, tied=True),
        Composed(build("1f1b", ranks=2, microbatches=4), "replicas", 2, tied=True),
        Composed(ZBV, tp=2),
    ],
    ids=str,
)
@small(lambda case: case.data == "fsdp")
def test_norms_of_every_kind_are_those_of_one_process(pools: Pools, case: Composed) -> None:
    answers = pools(4).run(norms, case)
    for found, right in answers[0]:
        assert found == pytest.approx(right, rel=1e-12)
    assert all(answer == answers[0] for answer in answers)


def norm_in_order() -> tuple[float, float]:
    case = Composed(build("1f1b", ranks=4, microbatches=4), dtype=torch.float32)
    pipeline, mesh = pipeline_of(case)
    with closing(pipeline):
        step(pipeline, case, mesh)
        found = float(pipeline.clip_grad_norm_(0.1))
    return found, float(nn.utils.clip_grad_norm_(alone(case).parameters(), 0.1))


def test_the_norm_of_bitwise_equal_gradients_is_bitwise_equal(pools: Pools) -> None:
    for found, right in pools(4).run(norm_in_order):
        assert found == right


def broken_norm() -> str:
    case = Composed(build("1f1b", ranks=4, microbatches=4))
    pipeline, mesh = pipeline_of(case)
    with closing(pipeline):
        step(pipeline, case, mesh)
        if dist.get_rank() == 2:
            grad = pipeline.modules[2].get_parameter("block2.up.bias").grad
            assert grad is not None
            grad[1] = torch.nan
        try:
            pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except PipelineError as error:
            assert torch.isnan(pipeline.clip_grad_norm_(1.0)), "it is no error unless one asks for it"
            return str(error)
    return ""


def test_a_norm_that_is_not_finite_names_the_stage(pools: Pools) -> None:
    messages = pools(4).run(broken_norm)
    assert all("those of stage 2" in text for text in messages), messages
    assert "block2.up.bias" in messages[2]


def clipped_too_early() -> str:
    case = Composed(ZBV, "fsdp", 2)
    pipeline, mesh = pipeline_of(case)
    with closing(pipeline):
        with pipeline.accumulate():
            step(pipeline, case, mesh)
        try:
            pipeline.clip_grad_norm_(1.0)
        except PipelineError as error:
            return str(error)
    return ""


def test_unreduced_gradients_have_no_norm(pools: Pools) -> None:
    assert all("accumulate()" in text for text in pools(4).run(clipped_too_early))


# --- scaling ---------------------------------------------------------------------------------------


def scaled(case: Composed) -> tuple[list[str], list[float], list[bool]]:
    """Problems, the scale after each step, and whether the optimizer did anything in it."""
    plain, _ = pipeline_of(case)
    pipeline, mesh = pipeline_of(case)
    scaler = GradScaler(pipeline, init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, foreach=case.tp == 1)
    problems, scales, moved = [], [], []
    with closing(plain), closing(pipeline):
        step(plain, case, mesh)
        wanted = dict(gradients(plain))
        for number in range(4):
            before = [local(p.detach()).clone() for p in pipeline.parameters()]
            step(pipeline, case, mesh, number)
            if number == 2 and dist.get_rank() == 1:  # an overflow that one rank alone has seen
                weight = next(iter(pipeline.parameters()))
                assert weight.grad is not None
                weight.grad.mul_(torch.inf)
            scaler.unscale_(optimizer)
            if number == 0:
                for name, gradient in gradients(pipeline):
                    if not torch.equal(gradient, wanted[name]):
                        problems.append(f"{name} differs")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(
                any(not torch.equal(a, local(b.detach())) for a, b in zip(before, pipeline.parameters()))
            )
    return problems, scales, moved


@pytest.mark.parametrize(
    "case", [Composed(ZBV, "fsdp", 2), Composed(ZBV, "replicas", 2, tied=True), Composed(ZBV, tp=2)], ids=str
)
@small(lambda case: case.data == "fsdp")
def test_an_overflow_on_one_rank_skips_the_step_on_all_of_them(pools: Pools, case: Composed) -> None:
    for problems, scales, moved in pools(4).run(scaled, case):
        assert not problems
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0]
        assert moved == [True, True, False, True]


def without_parameters() -> tuple[float, bool]:
    """The last of four ranks has nothing to train."""
    stages: dict[int, nn.Module] = {index: nn.Linear(4, 4) for index in range(3)}
    stages[3] = nn.Tanh()
    schedule = build("1f1b", ranks=4, microbatches=2)
    with closing(Pipeline(stages, schedule, loss=nn.functional.mse_loss, timeout=20.0)) as pipeline:
        scaler = GradScaler(pipeline, init_scale=8.0)
        spare = [nn.Parameter(torch.zeros(()))]
        optimizer = torch.optim.SGD([*pipeline.parameters()] or spare, lr=0.1)
        pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), float(pipeline.clip_grad_norm_(1.0)) > 0


def test_a_rank_with_nothing_to_train_takes_part(pools: Pools) -> None:
    assert pools(4).run(without_parameters) == [(8.0, True)] * 4


# --- adding up -------------------------------------------------------------------------------------


def added_up(case: Composed, held_back: bool) -> list[str]:  # noqa: FBT001 -- sent to other processes as it is
    """Two steps without zero_grad() between them, against twice the gradient of one."""
    pipeline, mesh = pipeline_of(case)
    model = alone(case)
    names = {"head.words.weight": "embed.weight"} if case.tied else {}
    problems = []
    with closing(pipeline):
        if held_back:
            with pipeline.accumulate():
                step(pipeline, case, mesh)
        else:
            step(pipeline, case, mesh)
        step(pipeline, case, mesh)
        for name, gradient in gradients(pipeline):
            right: Tensor | None = model.get_parameter(names.get(name, name)).grad
            assert right is not None
            if not torch.allclose(gradient, 2 * right, rtol=1e-10, atol=1e-12):
                problems.append(f"{name}: {float((gradient - 2 * right).abs().max())}")
    return problems


@pytest.mark.parametrize("held_back", [False, True])
@pytest.mark.parametrize("data", ["fsdp", "replicas", "ddp"])
@pytest.mark.full
def test_gradients_accumulate_with_and_without_reductions(
    pools: Pools,
    data: str,
    held_back: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    for schedule in (ZBV, build("1f1b", ranks=2, microbatches=4)):
        case = Composed(schedule, data, 2, tied=True)
        for problems in pools(4).run(added_up, case, held_back):
            assert not problems


class Choosy(nn.Module):
    """Uses a layer only where the first number of a batch is positive, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if bool(x[0, 0] > 0) else y


def unused() -> dict[str, bool]:
    """Which parameters have a gradient; replica 1 never uses one of them."""
    mesh = mesh_of_ranks(pp=2, dp=2)
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    stages: dict[int, nn.Module] = {0: first, 1: Choosy()}
    schedule = build("1f1b", ranks=2, microbatches=2)
    given: dict[str, Any] = {
        "group": mesh["pp"],
        "replicas": mesh["dp"],
        "loss": nn.functional.mse_loss,
        "timeout": 20.0,
    }
    with closing(Pipeline(stages, schedule, **given)) as pipeline, torch.no_grad():
        first.weight.copy_(torch.eye(4))
        first.bias.zero_()
        x = torch.ones(4, 4) * (1 if mesh.get_local_rank("dp") == 0 else -1)
        with torch.enable_grad():
            pipeline.step(x, target=torch.zeros(4, 4))
        return {n: p.grad is not None for m in pipeline.modules.values() for n, p in m.named_parameters()}


def test_a_weight_that_some_replicas_use_is_reduced_and_one_that_none_uses_is_not(
    pools: Pools,
) -> None:
    answers = pools(4).run(unused)
    for answer in answers[2:]:
        assert answer["sometimes.weight"]
        assert not answer["never.weight"]
