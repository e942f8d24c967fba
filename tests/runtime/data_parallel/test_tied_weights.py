"""Promise: a tied weight is trained as one weight, whichever ranks hold it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock import PenstockError, build
from penstock.runtime import Pipeline
from penstock.runtime.dtensors import local
from tests.support.composed_model import Composed, batch_of
from tests.support.composition import pipeline_of, replica_index
from tests.support.grids import small
from tests.support.pool import Pools

WIDTH = 6


class Turned(nn.Module):
    """A layer whose weight may be that of another layer."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) if weight is None else weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, self.weight))


def turned(count: int, tied: tuple[int, ...]) -> list[Turned]:
    """Stages of which some hold one weight."""
    torch.manual_seed(3)
    stages = [Turned() for _ in range(count)]
    for stage in tied[1:]:
        stages[stage] = Turned(stages[tied[0]].weight)
    return stages


def batch(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(2 * m, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


# --- where the holders are -------------------------------------------------------------------------


def three_holders() -> list[str]:
    """Stages 0, 1 and 3 of four ranks hold one weight; Adam trains it for four steps."""
    tied, m, problems = (0, 1, 3), 3, []
    alone = nn.Sequential(*turned(4, tied))
    stages = dict(enumerate(turned(4, tied)))
    x, y = batch(m)
    schedule = build("zb-h1", ranks=4, microbatches=m)
    with closing(Pipeline(stages, schedule, loss=functional.mse_loss, timeout=120)) as pipeline:
        assert pipeline.ties == ({0: "weight", 1: "weight", 3: "weight"},)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (pipeline, alone)]
        for _ in range(4):
            pipeline.step(x, target=y)
            for xs, ys in zip(x.chunk(m), y.chunk(m)):
                (functional.mse_loss(alone(xs), ys) / m).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        here, right = (each[dist.get_rank()].get_parameter("weight") for each in (pipeline.modules, alone))
        if not torch.allclose(here, right, rtol=1e-10, atol=1e-12):
            problems.append(f"off by {float((here - right).abs().max())}")
        copies = [torch.empty_like(here.data) for _ in range(4)]
        dist.all_gather(copies, here.data)
        if not all(torch.equal(copies[stage], copies[0]) for stage in tied):
            problems.append("the copies are not the same to the last bit")
    return problems


def test_three_ranks_share_one_weight(pools: Pools) -> None:
    assert pools(4).run(three_holders) == [[]] * 4


def on_one_rank(data: str) -> dict[str, Any]:
    """Stages 0 and 3 of a V are on rank 0."""
    case = Composed(build("zbv", ranks=2, microbatches=4), data, 2, tied=True)
    pipeline, mesh = pipeline_of(case)
    with closing(pipeline):
        names = {} if pipeline.rank else {0: "embed.weight", 3: "head.words.weight"}
        holders = [pipeline.modules[stage].get_parameter(name) for stage, name in names.items()]
        x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
        pipeline.step(x, target=y)
        found = {
            "one parameter": len(set(holders)) < 2,
            "one memory": len({local(each.data).data_ptr() for each in holders}) < 2,
            "groups": len(pipeline._ties.rank_groups),
        }
        if holders:  # what the optimizer does to one of them is there for the other
            with torch.no_grad():
                next(iter(pipeline.parameters())).add_(1)
            found["both change"] = bool(torch.equal(local(holders[0].data), local(holders[1].data)))
        pipeline.step(x, target=y)
    return found


@pytest.mark.parametrize("data", ["fsdp", "replicas"])
@small(lambda data: data == "replicas")
def test_both_ends_of_a_v_hold_the_same_parameter(pools: Pools, data: str) -> None:
    answers = pools(4).run(on_one_rank, data)
    for answer in answers:
        assert answer["one parameter"]
        assert answer["one memory"]
        assert answer["groups"] == 0
        assert answer.get("both change", True)


# --- what is refused -------------------------------------------------------------------------------


def refused(make: Any) -> str:
    try:
        with closing(make()) as pipeline:
            pipeline.step(*batch(4)[:1], target=batch(4)[1])
            if dist.get_rank() == 3:  # an optimizer that does something else
                with torch.no_grad():
                    pipeline.modules[3].get_parameter("weight")[0, 0] += 1e-9
            pipeline.step(*batch(4)[:1], target=batch(4)[1])
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong_ties() -> dict[str, str]:
    schedule = build("1f1b", ranks=4, microbatches=4)
    given: dict[str, Any] = {"loss": functional.mse_loss, "timeout": 15.0}
    rank = dist.get_rank()

    def apart() -> list[Turned]:
        stages = turned(4, ())
        stages[3] = Turned(nn.Parameter(stages[0].weight.detach().clone()))
        return stages

    def small() -> list[Turned]:
        stages = apart()
        if rank == 3:
            stages[3].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH - 1, dtype=torch.float64))
        return stages

    def every() -> dict[int, nn.Module]:
        return dict(enumerate(turned(4, ())))

    tie = [{0: "weight", 3: "weight"}]
    return {
        "drifted": refused(lambda: Pipeline([apart()[rank]], schedule, tied=tie, **given)),
        "other numbers": refused(lambda: Pipeline([turned(4, ())[rank]], schedule, tied=tie, **given)),
        "other shape": refused(lambda: Pipeline([small()[rank]], schedule, tied=tie, **given)),
        "no such name": refused(lambda: Pipeline(every(), schedule, tied=[{0: "w", 3: "weight"}], **given))
        if rank == 0
        else "",
        "no such stage": refused(
            lambda: Pipeline(every(), schedule, tied=[{0: "weight", 9: "weight"}], **given)
        ),
        "one stage": refused(lambda: Pipeline(every(), schedule, tied=[{1: "weight"}], **given)),
        "not agreed": refused(
            lambda: Pipeline([apart()[rank]], schedule, tied=tie if rank in (0, 3) else (), **given)
        ),
    }


def test_invalid_tied_weights_are_rejected(pools: Pools) -> None:
    messages = pools(4).run(wrong_ties)
    diverged = "tied weights have diverged: 'weight' of stage 0 and 'weight' of stage 3"
    assert "'w' of stage 0: there is no such parameter" in messages[0]["no such name"]
    for rank in range(4):
        assert "tied weight {0: 'weight', 3: 'weight'}" in messages[rank]["other shape"]
        assert "[6, 5]" in messages[rank]["other shape"]
        assert "{0: 'weight', 9: 'weight'}" in messages[rank]["no such stage"]
        assert "at least two of the stages 0 to 3" in messages[rank]["one stage"]
        assert "do not agree" in messages[rank]["not agreed"]
        assert diverged in messages[rank]["drifted"]
        assert diverged in messages[rank]["other numbers"]
