"""Promise: a forward runs once, whatever its module keeps, and the target of another rank is compared."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

from penstock import Schedule, build
from penstock.errors import PenstockError
from penstock.runtime import Pipeline
from tests.support.pool import Pools
from tests.support.single_rank import WIDTH, batch, schedules, train_both

SCHEDULES = schedules("1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)


class Shared(nn.Module):
    """A weight that is used by its layer and elsewhere, so that it cannot be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x)) + self.layer.weight.pow(2).mean()


class ConstantBuffer(Shared):
    """The graphs of all microbatches keep the same buffer."""

    base: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.base


class ReplacedBuffer(Shared):
    """A buffer that every forward replaces by another tensor."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Recomputed(Shared):
    """The shared weight is used inside of a part that the backward computes again."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


@each_schedule
@pytest.mark.parametrize("stage", [ConstantBuffer, ReplacedBuffer, Recomputed])
def test_buffers_and_shared_weights_are_as_in_one_process(stage: type[nn.Module], schedule: Schedule) -> None:
    assert not train_both(lambda *_: stage(), schedule)


@each_schedule
def test_every_forward_runs_once(schedule: Schedule) -> None:
    stages = [Shared() for _ in range(schedule.num_stages)]
    with closing(Pipeline(stages, schedule, loss=mse_loss)) as pipeline:
        pipeline.step(*batch()[:1], target=batch()[1])
    assert [stage.calls for stage in stages] == [schedule.microbatches] * len(stages)


@each_schedule
def test_hooks_of_a_weight_that_the_loss_uses_fire_once_for_each_microbatch(schedule: Schedule) -> None:
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
    head, fired = stages[-1], Counter[str]()
    head.weight.register_hook(lambda _: fired.update(["weight"]))  # type: ignore[no-untyped-call]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(linear(output, head.weight), target)

    with closing(Pipeline(stages, schedule, loss=loss)) as pipeline:
        pipeline.step(*batch()[:1], target=batch()[1])
    assert fired["weight"] == schedule.microbatches


def test_i_of_a_first_stage_computes_no_weight_gradient_and_w_computes_all() -> None:
    (schedule,) = schedules("zb-h1")
    layer, found = nn.Linear(WIDTH, WIDTH), list[tuple[str, int]]()
    fired = Counter[str]()
    layer.weight.register_hook(lambda _: fired.update(["weight"]))  # type: ignore[no-untyped-call]

    def look(custom: Any) -> None:
        before = fired["weight"]
        custom.run()
        found.append((str(custom.action), fired["weight"] - before))

    functions: dict[Any, Any] = {"I": look, "W": look}
    with closing(Pipeline([layer], schedule, loss=mse_loss, functions=functions)) as pipeline:
        pipeline.step(*batch()[:1], target=batch()[1])
    first = {"0I0": 1, "0W0": 0}  # it shows which weights are used outside of their layers
    assert dict(found) == {text: first.get(text, int("W" in text)) for text, _ in found}


def rejected_target(rows: int) -> str:
    schedule = build("1f1b", ranks=2, microbatches=4)
    stages: dict[int, nn.Module] = {stage: nn.Linear(WIDTH, WIDTH) for stage in range(2)}
    with closing(Pipeline(stages, schedule, loss=mse_loss)) as pipeline:
        try:
            pipeline.step(torch.ones(8, WIDTH), target=torch.ones(rows, WIDTH))
        except PenstockError as error:
            return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_with_other_rows_than_the_arguments_of_another_rank_is_rejected(pools: Pools) -> None:
    assert pools(2).run(rejected_target, 8) == ["", ""]
    for message in pools(2).run(rejected_target, 4):
        assert "step 1 failed on rank 1, stage 1, microbatch 0" in message
        assert "must have the same number of rows, but there are 8 in args[0], 4 in target" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch.jit
def test_scripted_modules_train_with_a_split_backward() -> None:
    def make(index: int, _count: int) -> nn.Module:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return torch.jit.script(layers) if index else nn.Sequential(torch.jit.script(layers[0]), layers[1])

    assert not train_both(make, schedules("zbv")[0])
