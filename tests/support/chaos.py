"""Training runs with one random fault each: what happens, where, and what every rank saw of it."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
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
from tests.support.composition import pipeline_of, replica_index, states
from tests.support.reference import differences

__all__ = ["FATAL", "Chaos", "Seen", "random_chaos", "train_with_fault"]

STEPS = 3
FATAL = ("kill", "exit", "stop")
"""Effects after which the rank is gone."""
_IN_STEP = ("forward", "loss", "backward", "send", "receive")
_EFFECTS = {
    **dict.fromkeys(_IN_STEP, ("raise", "memory", "slow", "kill", "stop")),
    "between": ("slow", "kill", "exit", "stop"),
    "optimizer": ("kill", "exit"),
    "save": ("full disk", "kill", "stop"),
}
_LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (3, {}),
    (4, {}),
    (2, {"data": "replicas", "replicas": 2}),
    (2, {"data": "fsdp", "replicas": 2}),
    (2, {"tp": 2}),
)
_LARGE: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {}),
    (2, {"data": "fsdp", "replicas": 2, "tp": 2}),
    (4, {"data": "replicas", "replicas": 2}),
)
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

    @property
    def ranks(self) -> int:
        """How many processes run."""
        return self.case.schedule.num_ranks * self.case.replicas * self.case.tp

    @property
    def fatal(self) -> bool:
        """Whether the rank is gone afterwards."""
        return self.effect in FATAL

    def __str__(self) -> str:
        return (
            f"{self.effect} on rank {self.victim} at {self.place} {self.nth} of step {self.step}: {self.case}"
        )


def random_chaos(rng: random.Random) -> Chaos:
    """Any fault, on 2 to 8 processes."""
    pp, others = rng.choice(_LARGE if rng.random() < 0.1 else _LAYOUTS)
    schedule = build(rng.choice(_FAMILIES), ranks=pp, microbatches=max(4, pp * 2))
    case = Composed(schedule, **others, steps=STEPS)
    place = rng.choice((*_IN_STEP, *_EFFECTS))
    nth = rng.randrange(schedule.microbatches) if place in _IN_STEP else 0
    step = 1 if place == "save" else rng.randrange(STEPS)
    width = case.replicas * case.tp
    host = schedule.placement.stage_to_rank[-1] if place == "loss" else rng.randrange(pp)
    victim = host * width + rng.randrange(width)
    return Chaos(case, victim, place, step, nth, rng.choice(_EFFECTS[place]))


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
            time.sleep(1)
        if self.chaos.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.chaos.effect == "exit":
            os._exit(3)
        if self.chaos.effect == "stop":
            self._stop()

    def _stop(self) -> None:
        """Stop answering, until all others have reported; then end."""
        others = f'[ "$(ls {self.folder}/done* 2>/dev/null | wc -l)" -lt {self.chaos.ranks - 1} ]'
        wait = f"n=0; while {others} && [ $n -lt 1200 ]; do sleep 0.1; n=$((n+1)); done; kill -9 {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", wait], start_new_session=True)  # noqa: S603
        os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _faults_in_steps(injector: _Injector, stages: Mapping[int, nn.Module]) -> Iterator[None]:
    """Report the events of a step to the injector."""

    def before(place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            injector.at(place)
            return method(*args, **kwargs)

        return call

    def watch_backward(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: injector.at("backward"))  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for owner, name, place in (
            (SendChannel, "send", "send"),
            (ReceiveChannel, "post", "receive"),
            (os, "fsync", "save"),
        ):
            stack.enter_context(mock.patch.object(owner, name, before(place, getattr(owner, name))))
        for stage in stages.values():
            stack.callback(stage.register_forward_pre_hook(lambda *_: injector.at("forward")).remove)
            stack.callback(stage.register_forward_hook(watch_backward).remove)
        yield


def train_with_fault(chaos: Chaos, folder: str, timeout: float) -> Seen:
    """Train as scripts do: a failed step is tried again, unless a rank is gone."""
    case, seen = chaos.case, Seen(dist.get_rank())
    injector = _Injector(chaos, Path(folder))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        injector.at("loss")
        return composed_model.loss(output, target)

    pipeline, mesh = pipeline_of(case, loss=loss, timeout=timeout)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01, foreach=case.tp == 1)
    replica = replica_index(case, mesh)
    with _faults_in_steps(injector, pipeline.modules):
        step, saved = 0, False
        while step < STEPS:
            injector.begin(step)
            injector.at("between")
            x, y = (rows.chunk(case.replicas)[replica] for rows in batch_of(case, step, 0))
            try:
                if step == 1 and not saved:
                    save_checkpoint(Path(folder) / "saved", pipeline, optimizer)
                    saved = True
                pipeline.step(x, target=y)
                pipeline.clip_grad_norm_(composed_model.MAX_NORM)
            except PenstockError as error:
                seen.aborted = "start again from a checkpoint" in str(error)
                if seen.aborted:
                    break
                seen.errors.append((f"{type(error).__name__}: {error}", time.monotonic()))
                optimizer.zero_grad()
                if chaos.fatal or len(seen.errors) > STEPS:
                    break
                continue
            injector.at("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            seen.trained.append(step)
            step += 1
    if not chaos.fatal and not seen.aborted:
        right = train_single_process(case).state
        for name, value in states(pipeline):
            seen.problems += differences("state", {name: value}, {name: right[name]}, exact=False, slack=1000)
        pipeline.close()
    (Path(folder) / f"done{seen.rank}").touch()
    return seen
