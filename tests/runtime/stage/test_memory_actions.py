"""Promise: every family trains to the same bits with recomputation and offload, fused and split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Schedule, build, families
from penstock.lowering import DEFAULT_PASSES, Offload, Pass, Policy, Recompute, SplitBackward, lower
from penstock.runtime import Pipeline
from tests.support.grids import small
from tests.support.models import MODELS, TASKS
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, Case, first_ranks, optimizer_of, problems_of, run_cases

ALL = tuple(family for family in families() if family != "forward-only")
WAYS = ("recompute", "recompute one", "recompute alternating", "offload", "both", "checkpoints offloaded")


def passes_of(way: str, schedule: Schedule) -> list[Pass]:
    passes: dict[str, list[Pass]] = {
        "recompute": [Recompute()],
        "recompute one": [Recompute(stages=(1,))],
        "recompute alternating": [Recompute(stages=tuple(range(0, schedule.num_stages, 2)))],
        "offload": [Offload(ahead=0)],
        "both": [Recompute(policy=Policy(every=2)), Offload(ahead=1)],
        "checkpoints offloaded": [Recompute(), Offload(ahead=0)],
    }
    return passes[way]


def made(family: str, way: str, *, p: int, split: bool) -> Schedule | None:
    """None for a family that has no fused backward."""
    plain = build(family, ranks=p, microbatches=4)
    halves = SplitBackward()(plain)
    if not split and halves == plain:
        return None
    schedule = halves if split else plain
    name = f"{family} {way} {'split' if split else 'fused'}"
    return lower(schedule, [*passes_of(way, schedule), *DEFAULT_PASSES]).renamed(name)


GRID = [(family, way, split) for family in ALL for way in WAYS for split in (False, True)]
SMALL = [
    ("gpipe", "both", True),
    ("1f1b", "recompute", False),
    ("interleaved-1f1b", "recompute alternating", False),
    ("zb-h1", "offload", True),
    ("zbv", "recompute one", True),
    ("dualpipev", "offload", False),
    ("interleaved-overlap", "checkpoints offloaded", False),
    ("po-h", "recompute one", True),
]


@pytest.mark.parametrize(("p", "grid"), [(2, "small"), (2, "full"), (4, "full")])
@small(lambda grid: grid == "small")
def test_families_train_to_the_same_bits(pools: Pools, p: int, grid: str) -> None:
    chosen = SMALL[::2] if grid == "small" else GRID[:: 5 if p == 2 else 17]  # all ways, some with each family
    tasks = cycle(("mlp", "dropout", "checkpointed", "mlp", "transformer"))
    schedules = [made(family, way, p=p, split=split) for family, way, split in chosen]
    cases = [Case(schedule, next(tasks), steps=3) for schedule in schedules if schedule is not None]
    assert not problems_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.parametrize(
    ("way", "split"), [("recompute", True), ("offload", False), ("checkpoints offloaded", True)]
)
@small(lambda: False)
def test_every_model_trains_to_the_same_bits(pools: Pools, way: str, *, split: bool) -> None:
    """With dropout, batch norm, tied weights, frozen stages, and checkpointing inside of a stage."""
    schedule = made("gpipe", way, p=2, split=split)
    assert schedule is not None
    cases = [Case(schedule, task, steps=3) for task in MODELS]
    assert not problems_of(cases, pools(2).run(run_cases, cases))


# --- a family that adds up gradients in another order than one process ------------------------------


def results(schedules: list[Schedule]) -> list[list[Tensor]]:
    """For each schedule the losses of three steps and the final gradients and parameters of this rank."""
    found = []
    task = TASKS["dropout"]
    for schedule in schedules:
        stages, tensors = task.stages(schedule.num_stages, torch.float32), list[Tensor]()
        group = first_ranks(schedule.num_ranks)
        with closing(
            Pipeline(dict(enumerate(stages)), schedule, loss=task.loss, group=group, timeout=TIMEOUT)
        ) as pipeline:
            optimizer = optimizer_of("sgd", pipeline.parameters())
            for step in range(3):
                batch = task.batch(step, schedule.microbatches, torch.float32)
                optimizer.zero_grad()
                loss = pipeline.step(*batch.args, target=batch.target, **batch.kwargs).loss
                optimizer.step()
                tensors.append(torch.tensor(loss))
            for parameter in pipeline.parameters():
                tensors += [parameter.detach(), *([] if parameter.grad is None else [parameter.grad])]
        found.append(tensors)
    return found


def test_breadth_first_trains_to_the_bits_of_the_plain_pipeline(pools: Pools) -> None:
    plain = build("looped-bfs", ranks=2, microbatches=4)
    schedules = [plain, *(lower(plain, passes_of(way, plain)) for way in ("both", "recompute one", "offload"))]
    for wanted, *others in pools(2).run(results, schedules):
        for found in others:
            assert len(wanted) > 3
            assert all(map(torch.equal, found, wanted))


# --- modules that run parts of themselves in other ways, on one rank --------------------------------


class Checkpointed(nn.Module):
    """Recomputes a part of itself in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._rest, self.first(x), use_reentrant=self.reentrant)
        return found

    def _rest(self, x: Tensor) -> Tensor:
        second: Tensor = self.second(nn.functional.dropout(torch.exp(x), 0.2))
        return second


def compiled() -> Any:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
    return torch.compile(layers, backend="aot_eager")


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "reentrant checkpoint": partial(Checkpointed, reentrant=True),
    "checkpoint": partial(Checkpointed, reentrant=False),
    "compiled": compiled,
}
ORDER = Schedule.parse("0F0 1F0 0F1 1F1 0F2 1F2 1B0 0B0 1B1 0B1 1B2 0B2")


def trained(make: Callable[[], nn.Module], schedule: Schedule, *, autocast: bool) -> list[Any]:
    torch.manual_seed(0)
    modules, batch = {stage: make() for stage in range(2)}, torch.randn(6, 4)
    with (
        closing(Pipeline(modules, schedule, loss=nn.functional.mse_loss)) as pipeline,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        found: list[Any] = [pipeline.step(batch, target=batch).loss for _ in range(2)]
        return [*found, *(p.grad for p in pipeline.parameters())]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("autocast", [False, True])
@small(lambda kind: kind != "compiled")
def test_checkpointed_and_compiled_modules_train_to_the_same_bits(kind: str, *, autocast: bool) -> None:
    wanted = trained(MAKERS[kind], ORDER, autocast=autocast)
    for way in ("recompute", "offload", "checkpoints offloaded"):
        found = trained(MAKERS[kind], lower(ORDER, passes_of(way, ORDER)), autocast=autocast)
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, wanted, strict=True)
        )
