"""Everything of one rank that lives as long as its connections do: groups, channels, programs, the watch.

A failed step breaks the connections, so all of this is thrown away and made anew; modules, gradients and the
schedule stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.dtensors import Meshes
from penstock.runtime.execution.program import WORK, CustomFunction, Program, Wires, forward_part
from penstock.runtime.execution.stage import Stage
from penstock.runtime.failure.watch import Status, Watch
from penstock.runtime.transport.buffer_pool import Pool
from penstock.runtime.transport.channels import Inbox, Outbox
from penstock.runtime.transport.links import Links
from penstock.validation import validate

__all__ = ["Plan", "Wiring"]


@dataclass(frozen=True)
class Plan:
    """What is decided once: the lowered schedule, this rank's place in it, and how it is run."""

    schedule: Schedule
    rank: int
    members: Sequence[int]
    """The ranks of the pipeline as the world numbers them."""
    device: torch.device
    timeout: timedelta
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    mesh: DeviceMesh | None = None
    """The pipeline's own, if it was given one: DTensors may come on other slices of the same."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return len(self.members) == 1


class Wiring:
    """The live half of a pipeline."""

    def __init__(self, plan: Plan, stages: Mapping[int, Stage], pool: Pool) -> None:
        self.plan, self.pool = plan, pool
        self._stages = stages
        self.mode = "outside"
        self.waiting = ""
        """In words: what this rank waits for at the end of a step, besides the losses."""
        self.step = 0
        """The number of the step or eval at hand."""
        self.links: Links | None = None
        self.watch: Watch | None = None
        self._meshes = Meshes([stage.module for stage in stages.values()], plan.mesh)
        self._outboxes: dict[tuple[Kind, int], Outbox] = {}
        self._inboxes: dict[tuple[Kind, int], Inbox] = {}
        if not plan.alone:
            channels = _channels(plan.schedule)
            m = plan.schedule.microbatches
            self.links = Links(plan.members, plan.rank, channels, m, plan.device, plan.timeout)
            for number, source, target in channels:
                self._add_channel(number, source, target)
        self._wire_stages()
        wires = Wires(stages, self._outboxes, self._inboxes, plan.functions, plan.replication)
        self.programs = {
            name: Program(schedule, plan.rank, wires, sends_may_wait=not validate(schedule))
            for name, schedule in (("step", plan.schedule), ("eval", forward_part(plan.schedule)))
        }
        if self.links is not None:
            ranks = len(plan.members)
            self.watch = Watch(self.links.watched_store, plan.rank, ranks, self.status, self.stop)

    def _add_channel(self, number: int, source: int, target: int) -> None:
        """This rank's end of a channel, if it has one. Channel 2s leads up from stage s, 2s + 1 down to it."""
        here, links = self.plan.rank, self.links
        assert links is not None
        below, back = divmod(number, 2)
        m = self.plan.schedule.microbatches
        if here == source:
            kind, stage = (Kind.SEND_B, below + 1) if back else (Kind.SEND_F, below)
            maker = self._stages[stage]
            what = f"stage {stage}, {'gradients to' if back else 'output for'} rank {target}"
            source_of = maker.gradient if back else maker.made
            self._outboxes[kind, stage] = Outbox(links, self.pool, number, target, m, what, source=source_of)
        elif here == target:
            kind, stage = (Kind.RECV_B, below) if back else (Kind.RECV_F, below + 1)
            inbox = Inbox(links, self.pool, number, source, m, f"stage {stage}", meshes=self._meshes)
            self._inboxes[kind, stage] = inbox

    def _wire_stages(self) -> None:
        """Each stage takes from a channel, or from its neighbour on this rank."""
        for stage in self._stages.values():
            below, above = self._stages.get(stage.index - 1), self._stages.get(stage.index + 1)
            if (inbox := self._inboxes.get((Kind.RECV_F, stage.index))) is not None:
                stage.take = inbox.take
            elif below is not None:
                stage.take = below.hand_over
            if (inbox := self._inboxes.get((Kind.RECV_B, stage.index))) is not None:
                stage.take_gradient = inbox.take
            elif above is not None:
                stage.take_gradient = above.hand_back

    @property
    def _ends(self) -> tuple[Outbox | Inbox, ...]:
        return (*self._outboxes.values(), *self._inboxes.values())

    def begin(self, mode: str, step: int) -> Program:
        """Set the channels to training or eval, and give the calls for it."""
        first = 0 if mode == "step" else self.plan.schedule.microbatches
        for end in self._ends:
            end.mode = first
        self.mode, self.step, self.waiting = mode, step, ""
        program = self.programs[mode]
        program.begin()
        return program

    def end(self) -> None:
        """The step is over, well or not."""
        self.mode = "outside"
        self.pool.end_step()

    def stop(self) -> None:
        """Make the running program end at its next call."""
        for program in self.programs.values():
            program.stop = True

    def status(self) -> Status:
        """What this rank is doing."""
        if self.mode == "outside":
            return Status("outside", self.step, 0, "")
        program = self.programs[self.mode]
        return Status(self.mode, self.step, program.place, self.waits_for(program))

    def message_sizes(self) -> dict[tuple[Kind, int], int]:
        """Bytes of the largest message of each outbox, as far as anything was sent."""
        return {
            key: max((layout.nbytes for layout in box.expected if layout is not None), default=0)
            for key, box in self._outboxes.items()
        }

    def waits_for(self, program: Program) -> str:
        """In words: the message that the rank waits for, and from or to whom; empty when it computes."""
        hosts, call = self.plan.schedule.placement.stage_to_rank, program.call
        if call is None:
            return self.waiting or (f"the losses from rank {hosts[-1]}" if program.finished else "")
        part = call.about if call.what != WORK else program.steps[call.place].parts[0]
        assert part is not None, "whatever waits says for what"
        below, above = part.stage - 1, part.stage + 1
        if part.kind.is_send:
            return f"{part} to be received by rank {hosts[above if part.kind is Kind.SEND_F else below]}"
        if call.what == WORK:
            return ""
        if part.kind is Kind.F:
            return f"the output of {below}F{part.microbatch} from rank {hosts[below]}"
        return f"the gradient of {above}F{part.microbatch}'s input from rank {hosts[above]}"

    def close(self) -> None:
        """Hang up; see `Links.close` for why everything under way is dropped first."""
        if self.watch is not None:
            self.watch.end()
        links, self.links = self.links, None
        if links is not None:
            for end in self._ends:
                end.drop()
            links.close()


def _channels(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Number, sending rank and receiving rank of every channel between ranks, in one order for all."""
    hosts = schedule.placement.stage_to_rank
    found = []
    for stage, (here, there) in enumerate(pairwise(hosts)):
        if here != there:
            found += [(2 * stage, here, there), (2 * stage + 1, there, here)]
    return found
