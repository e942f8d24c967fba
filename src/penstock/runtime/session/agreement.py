"""What the ranks of a pipeline agree on: when they connect, when a call begins, and when a step ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.formats import dumps
from penstock.ir.schedule import Schedule
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.dtensors import whole
from penstock.runtime.program.program import StepAbortedError
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import Pending, TransportError, transport_errors, wait
from penstock.traces.diagnose.rank_state import Wait, WaitKind

Facts: TypeAlias = Mapping[str, object]
"""By topic: the value that is compared."""


# --- connecting ----------------------------------------------------------------------------------------

COMPLETED = "completed calls of step() and eval()"
_COMPLETED_ADVICE = (
    "A call has ended with a result on the ranks that are ahead, and with an exception on the others, for "
    "example because it was interrupted at its end. So the ranks have trained on different batches: load a "
    "checkpoint and create the pipeline again on every rank, and continue from the batch of the checkpoint"
)


def check_agreement(
    config: ExecutionConfig,
    ties: TiedWeights,
    completed: int,
    loss_options: Mapping[str, object],
    communicator: Communicator,
) -> None:
    """Raise unless every rank has the same schedule, versions, ties and number of completed calls.

    Steps would hang or train wrongly. A topic is compared between the ranks that have it, such as a tied weight
    between those that hold it, and `loss_options` between those that compute a loss.
    """
    schedule = config.schedule
    facts: dict[str, object] = {
        "version of penstock": penstock.__version__,
        "version of torch": torch.__version__,
        "microbatches": schedule.microbatches,
        "stages": schedule.num_stages,
        **{f"tied weight {tie}": looks for tie, looks in ties.descriptions().items()},
        **loss_options,
        COMPLETED: completed,
    }
    for module in config.modules.values():
        _, parts = split_metadata(module, "split_stage") or (0, ())
        if len(parts) == schedule.num_stages:
            facts["split of the model"] = " | ".join(parts)
    facts |= {
        "schedule": schedule_digest(schedule),
        "tied weights": listed(ties.between_ranks) or "none",
    }
    has_loss = any(sink in config.modules for sink in schedule.graph.sinks)  # it weights losses by the replicas
    trained = [each for module in config.trained.values() for each in module.parameters()]
    if has_loss or any(parameter.requires_grad for parameter in trained):
        count = config.replication.count
        facts["replicas of its stages"] = f"{count}" if count > 1 else "1 (give replicas= if there are more)"
    texts = communicator.exchange_texts(json.dumps([schedule.name, facts]))
    by_rank: dict[int, dict[str, Any]] = {}
    shown = {}
    for rank, text in enumerate(texts):
        name, by_rank[rank] = json.loads(text)
        digits = by_rank[rank]["schedule"]
        shown[digits] = f"{name} ({digits})"
    if found := differences(by_rank, shown):
        advice = [_COMPLETED_ADVICE] if COMPLETED in found else []
        raise PipelineError("\n".join(["the ranks of the pipeline do not agree:", *found.values(), *advice]))


def digest(text: str) -> str:
    """Return a few digits in place of a long text, to compare it and to show it in a message."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def schedule_digest(schedule: Schedule) -> str:
    """Return the same digest for schedules that differ in their names only."""
    return digest(dumps(schedule.renamed("any"), "json"))


def differences(by_rank: Mapping[int, Facts], texts: Mapping[object, str] | None = None) -> dict[str, str]:
    """Return the topics on which ranks differ, each with a line for an error message.

    `texts` says how values are shown that are not their own text.
    """
    lines = {}
    for topic in dict.fromkeys(topic for facts in by_rank.values() for topic in facts):
        ranks_of_value: dict[object, list[int]] = {}
        for rank, facts in by_rank.items():
            if topic in facts:
                ranks_of_value.setdefault(facts[topic], []).append(rank)
        if len(ranks_of_value) > 1:
            shown = {value: (texts or {}).get(value, value) for value in ranks_of_value}
            groups = "; ".join(
                f"rank {listed(ranks)}: {shown[value]}" for value, ranks in ranks_of_value.items()
            )
            lines[topic] = f"  {topic}: {groups}"
    return lines


# --- calls ---------------------------------------------------------------------------------------------

_BYTES = 256
_ADVICE = (
    "Every rank must make the same calls of the pipeline in the same order: look for a call that depends on "
    "the rank, a data loader with fewer batches on one rank, or an exception that one rank caught"
)


class _ControlMessages:
    """Messages of one kind between this rank and others, received into a tensor for each rank."""

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._received: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._sent: list[Pending] = []

    def _post(self, purpose: ControlMessage) -> None:
        """Post the receives."""
        if (communicator := self._communicator) is not None:
            tag = communicator.control_tag(purpose)
            for rank, message in self._received.items():
                self._pending[rank] = communicator.receive_host(message, rank, tag)

    def _send(self, message: Tensor, ranks: Iterable[int], purpose: ControlMessage) -> None:
        """Send to these ranks, which have received what was sent last: that call has ended on all ranks."""
        if (communicator := self._communicator) is not None:
            tag = communicator.control_tag(purpose)
            self._sent = [communicator.send_host(message, rank, tag) for rank in ranks]

    def abandon(self) -> None:
        """Release everything that refers to the connections."""
        self._pending.clear()
        self._sent.clear()
        self._communicator = None


class CallAgreement(_ControlMessages):
    """Compares the calls of this rank and its peers, with which it exchanges the messages of the schedule.

    A rank announces its call when the call begins, so the announcement has arrived before the first message of
    that call is needed.
    """

    def __init__(self, communicator: Communicator | None, rank: int, peers: Iterable[int]) -> None:
        super().__init__(communicator)
        self._rank = rank
        self._received = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in peers}
        self._own = torch.zeros(0)

    def begin(self, call: Mapping[str, object]) -> None:
        """Announce a call: its name, and everything else that must be the same on all ranks."""
        announced = announcement(call)
        # receives first: a rank that gets an announcement can rely on its own being delivered
        self._post(ControlMessage.CALL)
        self._own = announced
        self._send(announced, self._received, ControlMessage.CALL)

    def check(self, peer: int) -> None:
        """Raise unless this rank and its peer make the same call."""
        if peer not in self._pending:
            return
        wait(self._pending.pop(peer))
        if not torch.equal(self._received[peer], self._own):
            calls = {self._rank: announced_call(self._own), peer: announced_call(self._received[peer])}
            found = differences(dict(sorted(calls.items())))
            heading = "the ranks of the pipeline do not make the same call:"
            raise PipelineError("\n".join([heading, *found.values(), _ADVICE]))

    def check_all(self) -> None:
        """Check the peers that were not checked yet."""
        for peer in list(self._pending):
            self.check(peer)


def announcement(call: Mapping[str, object], size: int = _BYTES) -> Tensor:
    """Return the bytes that say which call a rank makes; `size` is the same on all ranks."""
    text = json.dumps(call).encode().ljust(size)
    assert len(text) == size, f"the peers receive {size} bytes, not the {len(text)} of {call}"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def announced_call(announced: Tensor) -> dict[str, object]:
    """Return the topics of a call and their values."""
    found: dict[str, object] = json.loads(announced.numpy().tobytes())
    return found


# --- the end of a step ---------------------------------------------------------------------------------


class StepCommit(_ControlMessages):
    """Ends a step on all ranks together: no rank returns from it before every rank has finished it.

        other ranks                          rank of the last sink
        actions finished   --- FINISHED -->  waits until every rank has finished
                                             waits for the last sinks of other pipelines of this model:
                                             sums the losses over replicas, waits for tensor-parallel ranks
        return             <--- LOSSES ----  returns

    The sinks are the stages that feed no other, in a chain the last stage; `sinks` are those of this rank. The
    losses of sinks on other ranks are part of their FINISHED. So a failure on any rank fails the step on all of
    them, and all ranks agree on which batches were trained. Receives are posted before the step.
    """

    def __init__(
        self, communicator: Communicator | None, config: ExecutionConfig, sinks: Mapping[int, Stage]
    ) -> None:
        super().__init__(communicator)
        schedule = config.schedule
        self._config, self._sinks = config, sinks
        self._microbatches = schedule.microbatches
        ranks_of_sinks = [schedule.placement.stage_to_rank[sink] for sink in schedule.graph.sinks]
        self._source = ranks_of_sinks[-1]
        """The rank that adds up all losses and sends them."""
        self._is_source = config.rank == self._source
        self._others = [rank for rank in range(schedule.num_ranks) if rank != self._source]
        self._with_sinks = {rank for rank in ranks_of_sinks if rank != self._source}
        self._tensor_groups = _tensor_groups(config) if self._is_source else []
        self._message: Tensor
        self.awaited: Wait | None = None
        """What this rank waits for at the end of a step."""
        self.abort_requested = False
        """Set by another thread when the step has failed on another rank."""

    def begin(self) -> None:
        """Post the receives."""
        self._message = self._empty()
        self.awaited = None
        self._received = {self._source: self._message}
        if self._is_source:
            self._received = {rank: self._finished_message(rank) for rank in self._others}
        self._post(ControlMessage.FINISHED if self._is_source else ControlMessage.LOSSES)

    def _empty(self) -> Tensor:
        """Whether there is a loss, the loss of the step, the losses of the microbatches."""
        return torch.zeros(2 + self._microbatches, dtype=torch.float64)

    def _finished_message(self, rank: int) -> Tensor:
        return self._empty() if rank in self._with_sinks else torch.zeros(1, dtype=torch.uint8)

    def finish(self, weights: Sequence[float]) -> tuple[float | None, Tensor | None]:
        """Return the loss of the step over all replicas and of each microbatch, the same on every rank."""
        if not self._is_source:
            finished = self._finished_message(self._config.rank)
            self._add_own(finished, weights)
            self._send(finished, [self._source], ControlMessage.FINISHED)
            with self._waiting(Wait(WaitKind.RECEIVE, "the losses", self._source)):
                wait(self._pending.pop(self._source))
        else:
            self._add_own(self._message, weights)
            for rank in list(self._pending):
                with self._waiting(Wait(WaitKind.COMMIT, "the end of the step", rank)):
                    wait(self._pending.pop(rank))
            self._add_others()
            self._wait_for_tensor_parallel_ranks()
            if self.abort_requested:
                raise StepAbortedError
            # from here on the step has succeeded; nobody waits for a rank that dies before it receives this
            with suppress(TransportError):
                self._send(self._message, self._others, ControlMessage.LOSSES)
        if not self._message[0]:
            return None, None
        return float(self._message[1]), self._message[2:].clone()

    @contextmanager
    def _waiting(self, awaited: Wait) -> Iterator[None]:
        """Say what this rank waits for, also after the wait has failed."""
        self.awaited = awaited
        yield
        self.awaited = None

    def _add_own(self, message: Tensor, weights: Sequence[float]) -> None:
        """Add the losses of this rank's sinks, and this replica's part of the loss of the step."""
        shares = torch.tensor(weights, dtype=torch.float64)
        counted = shares > 0  # the mean over no tokens is not a number, and its weight is 0
        for sink in self._sinks.values():
            if sink.losses:
                in_order = [whole(sink.losses[microbatch]) for microbatch in range(self._microbatches)]
                losses = torch.stack([loss.reshape(()).to(torch.float64) for loss in in_order]).cpu()
                message[0] = 1
                message[1] += (losses[counted] * shares[counted]).sum() / self._config.replication.count
                message[2:] += losses

    def _add_others(self) -> None:
        """Add the losses of other ranks' sinks, and the parts of other replicas."""
        message, replication = self._message, self._config.replication
        has_loss = {self._source: bool(message[0])}
        for rank in sorted(self._with_sinks):
            has_loss[rank] = bool(self._received[rank][0])
            message += self._received[rank]
        if len(set(has_loss.values())) > 1:
            given, missing = ([r for r, has in has_loss.items() if has is which] for which in (True, False))
            raise PipelineError(
                f"rank {listed(given)} has a loss, but rank {listed(missing)} has none, and has a stage that "
                "feeds no other: give target= on the ranks of all such stages, or on none"
            )
        if message[0]:
            with self._waiting(Wait(WaitKind.COLLECTIVE, "the losses of its replicas")):
                message[1] = replication.total(message[1], self._config.device)

    def _wait_for_tensor_parallel_ranks(self) -> None:
        """Wait until the pipelines of the tensor-parallel ranks have finished the step too."""
        if self._tensor_groups:
            token = torch.zeros(1, device=self._config.device)
            awaited = Wait(WaitKind.COLLECTIVE, "the end of the step on its tensor-parallel ranks")
            with self._waiting(awaited), transport_errors():
                for group in self._tensor_groups:
                    dist.all_reduce(token, group=group)
                token.cpu()  # on a device, the host has not waited yet


def _tensor_groups(config: ExecutionConfig) -> list[dist.ProcessGroup]:
    """The groups of the ranks that hold other parts of this rank's stages, besides its replicas and shards."""
    pipeline, known = set(config.members), config.replication.groups
    return [
        group
        for group in model_groups(config.trained.values(), ())
        if group not in known and len(pipeline & set(dist.get_process_group_ranks(group))) == 1
    ]
