"""Training over several hosts, compared with one process; a link may be cut in the middle of a step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from penstock.runtime import Pipeline
from tests.support.call_outcomes import CallOutcome, attempt
from tests.support.host_ranks import join
from tests.support.hosts import Hosts

__all__ = ["LARGE", "SMALL", "TRAININGS", "Cut", "Training", "steps_of", "train"]

MICROBATCHES, STEPS = 4, 3
SMALL = (8, 32)
"""Rows of a microbatch and their width: messages of 1 KiB, which are sent eagerly."""
LARGE = (64, 512)
"""Messages of 128 KiB, which gloo sends."""


@dataclass(frozen=True)
class Cut:
    """The link of a host is cut in a forward of the second step on a rank, and perhaps restored."""

    hosts: Hosts
    host: int
    rank: int
    seconds: float | None = None
    """After which the link is restored."""

    def __call__(self) -> None:
        self.hosts.cut(self.host)
        if self.seconds is not None:
            threading.Timer(self.seconds, self.hosts.restore, [self.host]).start()


@dataclass(frozen=True)
class Training:
    """What is trained, and how. The dimensions of the mesh are named from the outermost on."""

    sizes: tuple[int, int] = SMALL
    family: str = "1f1b"
    mesh: tuple[str, ...] = ("pp",)
    timeout: float = 60.0
    state_dir: str | None = None


TRAININGS = {
    "small messages": Training(SMALL),
    "large messages": Training(LARGE),
    "zbv": Training(LARGE, "zbv"),
    "pipelines between hosts": Training(SMALL, mesh=("pp", "dp")),
    "replicas between hosts": Training(LARGE, mesh=("dp", "pp")),
}


class _Stage(nn.Module):
    """A linear layer that may cut a link at one of its forwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.calls = 0
        self.cut: Cut | None = None
        self.cut_at = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.cut is not None and self.calls == MICROBATCHES + 2:
            self.cut_at = time.monotonic()
            self.cut()
        self.calls += 1
        return torch.tanh(self.inner(x))


def train(training: Training, cut: Cut | None = None) -> list[CallOutcome]:
    """Some steps with right gradients, until one fails: how each ended."""
    join()
    groups: dict[str, dist.ProcessGroup] = {}
    if len(training.mesh) > 1:
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=training.mesh)
        groups = {name: mesh.get_group(name) for name in training.mesh}
    ranks = dist.get_world_size(groups.get("pp"))
    schedule = penstock.build(training.family, ranks=ranks, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    rows, width = training.sizes
    stages = [_Stage(width) for _ in range(schedule.num_stages)]
    whole = nn.Sequential(*copy.deepcopy(stages))
    replica = dist.get_rank(groups["dp"]) if "dp" in groups else 0
    x, y = torch.randn(2, 2, MICROBATCHES * rows, width).unbind()  # for two replicas
    own_stage = stages[schedule.placement.stages_of_rank[dist.get_rank(groups.get("pp"))][0]]
    if cut is not None and cut.rank == dist.get_rank():
        own_stage.cut = cut
    outcomes = []
    with Pipeline(
        dict(enumerate(stages)),
        schedule,
        loss=mse_loss,
        timeout=training.timeout,
        group=groups.get("pp"),
        replicas=groups.get("dp"),
        state_dir=training.state_dir,
    ) as pipeline:
        for _ in range(STEPS):
            outcome = attempt(lambda: pipeline.step(x[replica], target=y[replica]).loss)
            outcomes.append(replace(outcome, injected_at=own_stage.cut_at))
            if outcome.error:
                break
            together = slice(None) if groups else slice(0, 1)
            _assert_gradients(pipeline, whole, x[together], y[together])
    return outcomes


@contextmanager
def steps_of(
    microbatches: int = MICROBATCHES, sizes: tuple[int, int] = SMALL, **options: Any
) -> Iterator[Callable[[], float | None]]:
    """A call that trains a pipeline over all ranks for a step."""
    rows, width = sizes
    stages = dict(enumerate(nn.Linear(width, width) for _ in range(dist.get_world_size())))
    x = torch.ones(microbatches * rows, width)
    with Pipeline(stages, microbatches=microbatches, loss=mse_loss, **{"schedule": "1f1b", **options}) as one:
        yield lambda: one.step(x, target=x).loss


def _assert_gradients(pipeline: Pipeline, whole: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """The same as of one process with the batches of all replicas."""
    whole.zero_grad()
    mse_loss(whole(x), y).backward()  # type: ignore[no-untyped-call]
    for index, module in pipeline.modules.items():
        for own, right in zip(module.parameters(), whole[index].parameters()):
            assert own.grad is not None
            torch.testing.assert_close(own.grad, right.grad)
            own.grad = None
