"""Training runs with one random fault each: what happens, where, and what every rank saw of it."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import build
from penstock.errors import PenstockError
from penstock.runtime import save_checkpoint
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel
from tests.support import composed_model
from tests.support.composed_model import Composed, batch_of, train_single_process
from tests.support.composition import mesh_of, parallel_stages, pipeline_of_stages, replica_index, states
from tests.support.reference import differences

__all__ = ["FATAL", "Chaos", "Seen", "random_chaos", "train_with_fault"]

STEPS = 3
FATAL = ("kill", "exit", "stop")
"""Effects after which the rank is gone."""
_IN_STEP = ("forward", "loss", "backward", "send", "receive")
_EFFECTS = {
    **dict.fromkeys(_IN_STEP, ("raise", "memory", "slow", "kill")),
    "between": ("slow", "kill", "exit"),
    "optimizer": ("kill", "exit"),
    "save": ("full disk", "kill"),
}
_LATE = 0.08
"""The share of faults for which the others wait until the timeout: a rank that stops, or never connects."""
_LAYOUTS: tuple[tuple[float, int, dict[str, Any]], ...] = (
    (10, 2, {}),
    (4, 3, {}),
    (1, 4, {}),
    (1, 2, {"data": "replicas", "replicas": 2}),
    (1, 2, {"data": "fsdp", "replicas": 2}),
    (1, 2, {"tp": 2}),
    (0.25, 8, {}),
    (0.25, 2, {"data": "fsdp", "replicas": 2, "tp": 2}),
    (0.25, 4, {"data": "replicas", "replicas": 2}),
)
"""How often, on how many ranks, with which other dimensions; few processes are cheap."""
_FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev")


@dataclass(frozen=True)
class Chaos:
    """A training run and its fault."""

    case: Composed
    victim: int
    """The rank in the world on which it happens."""
    place: str
    """The kind of event at which it happens."""
    step: int
    nth: int
    """At which of the events of this kind in that step."""
    effect: str
    saves: bool
    """Whether a checkpoint is saved before step 1."""

    @property
    def ranks(self) -> int:
        """How many processes run."""
        return self.case.schedule.num_ranks * self.case.replicas * self.case.tp

    @property
    def fatal(self) -> bool:
        """Whether the rank is gone afterwards."""
        return self.effect in FATAL

    @property
    def late(self) -> bool:
        """Whether the others notice it only after the timeout."""
        return self.effect == "stop" or self.place == "construction"

    def __str__(self) -> str:
        return (
            f"{self.effect} on rank {self.victim} at {self.place} {self.nth} of step {self.step}: {self.case}"
        )


def random_chaos(rng: random.Random) -> Chaos:
    """Any fault, on 2 to 8 processes."""
    ((_, pp, others),) = rng.choices(_LAYOUTS, [often for often, _, _ in _LAYOUTS])
    schedule = build(rng.choice(_FAMILIES), ranks=pp, microbatches=max(4, pp * 2))
    case = Composed(schedule, **others, steps=STEPS)
    place = rng.choice((*_IN_STEP, *_EFFECTS))
    nth = rng.randrange(schedule.microbatches) if place in _IN_STEP else 0
    step = 1 if place == "save" else rng.randrange(STEPS - (place == "optimizer"))  # none waits for the last
    width = case.replicas * case.tp
    host = schedule.placement.stage_to_rank[-1] if place == "loss" else rng.randrange(pp)
    victim = host * width + rng.randrange(width)
    effect, saves = rng.choice(_EFFECTS[place]), place == "save" or rng.random() < 0.3
    if rng.random() < _LATE:
        effect = "stop"
        if width == 1 and rng.random() < 0.3:  # else its replicas may notice before anybody knows its name
            place, step, nth, effect = "construction", 0, 0, rng.choice(FATAL)
    return Chaos(case, victim, place, step, nth, effect, saves)


@dataclass
class Seen:
    """What one rank saw."""

    rank: int
    trained: list[int] = field(default_factory=list)
    """The batches that it trained."""
    errors: list[tuple[str, float]] = field(default_factory=list)
    """Text and time of every error."""
    problems: list[str] = field(default_factory=list)
    """Differences of the trained weights from those of one process."""
    aborted: bool = False
    """Whether the job must start again, because the fault interrupted a collective."""


class InjectedError(Exception):
    """What a fault raises."""


class _Injector:
    """Counts the events of each kind in the current step, and lets the fault happen at the right one."""

    def __init__(self, chaos: Chaos, folder: Path) -> None:
        self.chaos, self.folder = chaos, folder
        self.step = 0
        self.counts: dict[str, int] = {}
        self.injected_at = 0.0

    def begin(self, step: int) -> None:
        """Count anew."""
        self.step, self.counts = step, {}

    def at(self, place: str) -> None:
        """An event of this kind happens."""
        nth = self.counts.get(place, 0)
        self.counts[place] = nth + 1
        chaos = self.chaos
        here = (place, self.step, nth) == (chaos.place, chaos.step, chaos.nth)
        if not here or self.injected_at or chaos.victim != dist.get_rank():
            return
        self.injected_at = time.monotonic()
        (self.folder / "injected").write_text(str(self.injected_at), encoding="utf-8")
        self._happen()

    def _happen(self) -> None:
        if self.chaos.effect == "raise":
            raise InjectedError(f"injected at {self.chaos.place}")
        if self.chaos.effect == "memory":
            torch.empty(1 << 50, dtype=torch.uint8)
        if self.chaos.effect == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.chaos.effect == "slow":
            time.sleep(0.3)
        if self.chaos.effect == "exit":
            os._exit(3)
        if self.chaos.effect in ("kill", "stop"):  # the pool kills processes that are stopped
            os.kill(os.getpid(), signal.SIGKILL if self.chaos.effect == "kill" else signal.SIGSTOP)


@contextmanager
def _faults_in_calls(injector: _Injector) -> Iterator[None]:
    """Report calls to the injector; a pipeline must be created in here, because it binds its methods."""

    def before(place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            injector.at(place)
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, place in (
            (SendChannel, "send", "send"),
            (ReceiveChannel, "wait", "receive"),
            (os, "fsync", "save"),
        ):
            stack.enter_context(mock.patch.object(owner, name, before(place, getattr(owner, name))))
        yield


def _watch_stages(injector: _Injector, stages: Mapping[int, nn.Module]) -> None:
    """Report forwards and backwards to the injector."""

    def watch_backward(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: injector.at("backward"))  # type: ignore[no-untyped-call]

    for stage in stages.values():
        stage.register_forward_pre_hook(lambda *_: injector.at("forward"))
        stage.register_forward_hook(watch_backward)


def train_with_fault(chaos: Chaos, folder: str, timeout: float) -> Seen:
    """Train as scripts do: a failed step is tried again, unless a rank is gone."""
    seen = Seen(dist.get_rank())
    injector = _Injector(chaos, Path(folder))
    with _faults_in_calls(injector):
        try:
            _train(chaos, injector, seen, timeout)
        except PenstockError as error:
            seen.errors.append((f"{type(error).__name__}: {error}", time.monotonic()))
    return seen


def _train(chaos: Chaos, injector: _Injector, seen: Seen, timeout: float) -> None:
    case = chaos.case

    def loss(output: Tensor, target: Tensor) -> Tensor:
        injector.at("loss")
        return composed_model.loss(output, target)

    mesh = mesh_of(case)
    stages = parallel_stages(case, mesh)
    dist.barrier()  # errors of torch while a mesh is created are not the pipeline's
    injector.at("construction")
    pipeline = pipeline_of_stages(case, stages, mesh, loss=loss, timeout=timeout)
    _watch_stages(injector, pipeline.modules)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=case.tp == 1)
    replica = replica_index(case, mesh)
    saved = False
    while len(seen.trained) < STEPS:
        step = len(seen.trained)
        injector.begin(step)
        injector.at("between")
        x, y = (rows.chunk(case.replicas)[replica] for rows in batch_of(case, step, 0))
        try:
            if chaos.saves and step == 1 and not saved:
                save_checkpoint(injector.folder / "saved", pipeline, optimizer)
                saved = True
            pipeline.step(x, target=y)
            pipeline.clip_grad_norm_(composed_model.MAX_NORM)
        except PenstockError as error:
            seen.aborted = "start again from a checkpoint" in str(error)
            if seen.aborted:
                return
            if chaos.fatal or len(seen.errors) == STEPS:
                raise
            seen.errors.append((f"{type(error).__name__}: {error}", time.monotonic()))
            optimizer.zero_grad()
            continue
        injector.at("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        seen.trained.append(step)
    if not chaos.fatal:
        right = train_single_process(case).state
        for name, value in states(pipeline):
            seen.problems += differences("state", {name: value}, {name: right[name]}, exact=False, slack=1000)
        pipeline.close()
