"""Promise: values are received as they were sent, and stay unchanged while a user keeps them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Schedule, build
from penstock.errors import PenstockError
from penstock.runtime import Pipeline
from penstock.runtime.pytree import flatten
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.channels import SendChannel
from tests.support.grids import thinned
from tests.support.models import TASKS, WIDTH, Task, made, squared
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, Case, Outcome, problems_of, run_cases, train_in_pipeline
from tests.support.stage_values import VALUES


def run_values(case: Case) -> Outcome:
    return train_in_pipeline(case)


def schedules() -> list[Schedule]:
    """Crossing once, turning on a rank, and crossing three times with split backwards."""
    return [
        build("1f1b", ranks=2, microbatches=3),
        build("zbv", ranks=2, microbatches=2),
        build("interleaved-zero-bubble", ranks=2, microbatches=2),
    ]


@pytest.mark.parametrize(
    "name",
    VALUES,
)
def test_stages_can_pass(pools: Pools, name: str) -> None:
    cases = [Case(schedule, name) for schedule in thinned(schedules(), 2)]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_values))


# --- pending sends -------------------------------------------------------------------------------


class Recorded:
    """Replaces a communicator; a wait for a message of it is recorded."""

    single_group = True

    def __init__(self) -> None:
        self.waited: list[int] = []

    def tag(self, _channel: int, slot: int, lane: int) -> int:
        return 4 * slot + lane

    def send(self, _tensor: Tensor, _peer: int, _channel: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.waited.append(tag // 4))

    def send_host(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return self.send(tensor, peer, 0, tag)


@pytest.mark.parametrize(("numbers", "waits"), [(4, False), (2**20, True)])
def test_only_long_messages_are_limited(numbers: int, *, waits: bool) -> None:
    communicator: Any = Recorded()
    channel = SendChannel(communicator, BufferPool(torch.device("cpu")), 0, 1, 3, "stage 0")
    for microbatch in range(2):
        channel.send(microbatch, *flatten(torch.zeros(numbers)))
    channel.limit(0)
    assert (0 in communicator.waited) is waits
    channel.release(0)
    assert 0 in communicator.waited
    before = len(communicator.waited)
    channel.release(0)
    assert len(communicator.waited) == before


# --- what users keep -----------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps inputs, outputs and the gradients of both, each with a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept: list[tuple[str, Any, Tensor]] = []

    def keep(self, what: str, value: Tensor) -> None:
        kept: Any = value.detach().numpy() if len(self.kept) % 2 else value[:1] if len(self.kept) % 3 else value
        self.kept.append((what, kept, torch.as_tensor(kept).detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        self.keep("input", x)
        y = torch.tanh(self.layer(x))
        if y.requires_grad:
            hooked: Any = y
            hooked.register_hook(lambda gradient: self.keep("gradient of the output", gradient))
        if x.requires_grad:
            hooked = x
            hooked.register_hook(lambda gradient: self.keep("gradient of the input", gradient))
        self.keep("output", y)
        return y


def run_keeping(schedule: Schedule) -> Outcome:
    outcome = Outcome()
    stages = {index: Keeping() for index in range(schedule.num_stages)}
    with closing(Pipeline(stages, schedule, loss=squared, timeout=TIMEOUT)) as pipeline:
        for step in range(4):
            batch = TASKS["mlp"].batch(step, schedule.microbatches, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            pipeline.eval(*batch.args, target=batch.target)
        for stage in pipeline.modules.values():
            assert isinstance(stage, Keeping)
            if len(stage.kept) < 12 * schedule.microbatches:
                outcome.problems.append(f"only {len(stage.kept)} things were kept")
            changed = [
                what for what, kept, copy in stage.kept if not torch.equal(torch.as_tensor(kept).detach(), copy)
            ]
            if changed:
                outcome.problems.append(f"overwritten: {changed}")
    return outcome


def test_tensors_that_a_user_keeps_are_never_overwritten(pools: Pools) -> None:
    cases = [*schedules(), build("gpipe", ranks=2, microbatches=4), build("zb-h2", ranks=2, microbatches=6)]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_keeping))


class Recurrent(nn.Module):
    """Each microbatch sees the input of the microbatch before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        if self.before is not None:
            y = y + self.before / 3
        self.before = x.detach()
        return y


TASKS["recurrent"] = Task(made(lambda *_: Recurrent()), TASKS["mlp"].batch, squared)


def test_a_stage_may_keep_its_last_input(pools: Pools) -> None:
    cases = [Case(schedule, "recurrent") for schedule in schedules()]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_values))


def test_returned_outputs_stay_unchanged(pools: Pools) -> None:
    assert pools(2).run(outputs_kept) == [True, True]


def outputs_kept() -> bool:
    schedule = build("1f1b", ranks=2, microbatches=4)
    stages = dict(enumerate([nn.Linear(WIDTH, WIDTH), nn.Identity()]))  # the last hands out what it received
    kept = []
    with closing(Pipeline(stages, schedule, loss=squared, timeout=TIMEOUT)) as pipeline:
        for step in range(4):
            batch = TASKS["mlp"].batch(step, 4, torch.float32)
            for call in (pipeline.step, pipeline.eval):
                result = call(*batch.args, target=batch.target, return_outputs=True)
                if result.outputs is not None:
                    kept.append((result.outputs, result.outputs.clone()))
    return all(torch.equal(*pair) for pair in kept) and len(kept) in (0, 8)


# --- what cannot be sent-------------------------------------------------------------------------


class Giving(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(self.layer(x))


def refused_value(kind: str) -> str:
    give = {"sparse": lambda y: y.to_sparse(), "lambda": lambda y: (y, lambda: y)}[kind]
    schedule = build("1f1b", ranks=2, microbatches=2)
    pipeline = Pipeline({0: Giving(give), 1: nn.Identity()}, schedule, loss=squared, timeout=TIMEOUT)
    batch = TASKS["mlp"].batch(0, 2, torch.float32)
    with closing(pipeline):
        try:
            pipeline.step(*batch.args, target=batch.target)
        except PenstockError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"), [("sparse", "cannot be sent to another rank"), ("lambda", "cannot be pickled")]
)
def test_a_value_that_cannot_be_sent_is_rejected_on_every_rank(pools: Pools, kind: str, words: str) -> None:
    for message in pools(2).run(refused_value, kind):
        assert words in message
