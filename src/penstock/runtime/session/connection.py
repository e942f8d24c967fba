"""The connected part of a pipeline on one rank: communicator, channels, stages, programs and failure monitor.

A failed step breaks the connections, so all of this is discarded and created anew. Modules, gradients and the
schedule stay. Neither the parts of a connection nor the thread of its monitor refer back to it, so all of it is
freed with the last reference to the pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from penstock.ir.kinds import Kind
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.dtensors import Meshes
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import FailureCause, RankStatus
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.failure.process_detector import (
    abort_groups,
    connecting,
    detector_of_job,
    link_members,
    raise_if_aborted,
    raise_if_ended,
)
from penstock.runtime.program.channel_ends import (
    ChannelEnds,
    ValueSources,
    channels_between_ranks,
    peers_of,
    receiving_stage,
)
from penstock.runtime.program.program import ExecutionContext, Program, compile_program, forward_only
from penstock.runtime.session.agreement import CallAgreement, StepCommit
from penstock.runtime.session.replica_peers import ReplicaPeers, peer_groups_of
from penstock.runtime.stage.microbatch import LiveActivations, StageConfig, microbatches_with, sends_at_once
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.communicator import Communicator
from penstock.traces.diagnose.rank_state import Wait

T = TypeVar("T")


class Connection:
    """One rank's connection; all ranks of the pipeline create it at the same time."""

    def __init__(self, config: ExecutionConfig, activations: LiveActivations, pool: BufferPool) -> None:
        self.config, self.pool = config, pool
        self.mode = "outside"
        """`step`, `eval` or the name of a collective while one runs."""
        self.waiting_for: Wait | None = None
        """What this rank waits for before its first or after its last action."""
        self.call_number = 0
        """The number of the current or last call of step or eval: one more than were completed before it."""
        self.step_number = 0
        """The number of the current or last step; an eval has that of the step before it."""
        self.call_name = ""
        """Its name for messages, in which only steps are counted."""
        self._failed = False
        """Whether a step has failed on any rank."""
        self.on_failure: Callable[[], Callable[[FailureCause], None] | None] | None = None
        """A weak reference to what is called when a failure becomes known, before anything is aborted."""
        schedule, rank = config.schedule, config.rank
        self.peer_groups = peer_groups_of(config)
        detector = None if config.is_single_rank and not self.peer_groups else detector_of_job(config.timeout)
        self.communicator = None if detector is None else self._connect(detector)
        self.calls = CallAgreement(self.communicator, rank, peers_of(schedule, rank))
        self.replica_peers: ReplicaPeers | None = None
        """Compares calls with ranks of other pipelines; set after the handshake."""
        meshes = Meshes(list(config.modules.values()), config.mesh)
        self.channels = ChannelEnds(schedule, rank, self.communicator, pool, meshes)
        self.stages: dict[int, Stage] = {}
        self.sources = ValueSources(schedule, self.channels, config.modules)
        for index, module in config.modules.items():
            self.stages[index] = Stage(index, module, self._stage_config(index), activations, pool)
        self.sources.stages.update(self.stages)
        self.sinks = {sink: self.stages[sink] for sink in schedule.graph.sinks if sink in self.stages}
        """The stages of this rank that feed no other."""
        self.commit = StepCommit(self.communicator, config, self.sinks)
        self.programs = self._compiled()
        self.monitor: FailureMonitor | None = None
        if detector is not None:
            detector.timeout = config.timeout.total_seconds()
            self.monitor = FailureMonitor(
                detector,
                uuid4().hex if self.communicator is None else self.communicator.name,
                config.members,
                config.timeout.total_seconds(),
                weakly(self.status, RankStatus("outside", 0, 0, None)),
                weakly(self.stop_waiting),
                weakly(self.abort_all_groups),
            )
            self._release = weakref.finalize(self, _release, self.monitor, self.communicator)

    def _connect(self, detector: FailureDetector) -> Communicator | None:
        """The messages with the other ranks of the pipeline; None if there are none."""
        config = self.config
        raise_if_aborted(detector, config.members)
        if config.is_single_rank:
            return None
        with connecting(config):
            communicator = Communicator(
                config.members,
                config.rank,
                channels_between_ranks(config.schedule),
                config.schedule.microbatches,
                config.device,
                config.timeout,
                partial(raise_if_ended, config.members),  # not the config, which has modules and losses
            )
            link_members(detector, config.members, config.timeout)
        return communicator

    # --- stages and programs -----------------------------------------------------------------------

    def _stage_config(self, index: int) -> StageConfig:
        config = self.config
        inputs, outputs = config.schedule.graph.inputs(index), config.schedule.graph.outputs(index)
        takers = tuple(each for each in outputs if receiving_stage(config.schedule, index, each) == each)
        return StageConfig(
            inputs=inputs,
            outputs=outputs,
            takers=takers,
            input_source=self.sources.inputs(index),
            gradient_source=self.sources.gradients(index),
            split_microbatches=microbatches_with(Kind.I, config.schedule, index),
            recomputed_microbatches=microbatches_with(Kind.RECOMPUTE, config.schedule, index),
            offloaded_microbatches=microbatches_with(Kind.OFFLOAD, config.schedule, index),
            sends_at_once=len(takers) == 1 and not config.functions and sends_at_once(config.schedule, index),
            loss=config.losses.get(index),
            shards=config.replication.shards.get(index),
            is_replicated=config.replication.count > 1,
            check_finite=config.check_finite,
            gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        )

    def _compiled(self) -> dict[str, Program]:
        config, channels = self.config, self.channels
        context = ExecutionContext(
            self.stages,
            channels.sends,
            channels.receives,
            config.functions,
            config.replication,
            self.calls.check,
            self.communicator is not None and self.communicator.single_group,
        )
        verified = config.verified
        evaluated = replace(verified, schedule=forward_only(verified.schedule))
        return {
            "step": compile_program(verified, config.rank, context),
            "eval": compile_program(evaluated, config.rank, context),
        }

    def set_completed(self, calls: int, steps: int) -> None:
        """Set the numbers of calls of step and eval, and of steps, that were completed before the next one."""
        self.call_number, self.step_number, self.call_name = calls, steps, f"step {steps}"

    # --- a step ------------------------------------------------------------------------------------

    def begin(self, mode: str) -> Program:
        """Start a step or eval; return the program to run."""
        is_step = mode == "step"
        self.channels.set_mode(training=is_step)
        self.call_number += 1
        self.step_number += is_step
        self.call_name = f"{'step' if is_step else 'the eval after step'} {self.step_number}"
        self.mode, self.waiting_for = mode, None
        program = self.programs[mode]
        program.begin()
        if self._failed:  # read after the step is set, as `stop_waiting` reads the step after it has set this
            self._request_abort()
        if self.monitor is not None:
            self.monitor.begin()
        return program

    def end(self) -> None:
        """End a step or eval, successful or not."""
        self.mode = "outside"
        self.pool.end_step()

    def stop_waiting(self) -> None:
        """Make a running step stop before its next call and end its wait; a later step does not start.

        A rank that is behind the failed one completes its step: all ranks have finished it by then.
        """
        self._failed = True
        cause = None if self.monitor is None else self.monitor.cause
        if cause is not None and self.on_failure is not None and (write := self.on_failure()) is not None:
            write(cause)
        if self.mode in self.programs and cause is not None and cause.call_number > self.call_number:
            return
        self._request_abort()
        if self.mode != "outside":
            self.abort()
        if self.config.replication.has_unfinished:
            abort_groups()

    def _request_abort(self) -> None:
        for program in self.programs.values():
            program.progress.abort_requested = True
        self.commit.abort_requested = True

    def abort_all_groups(self) -> None:
        """End the wait of this rank in a collective with ranks of other pipelines."""
        if dist.get_world_size() > len(self.config.members):
            abort_groups()

    # --- status ------------------------------------------------------------------------------------

    def status(self) -> RankStatus:
        """What this rank is doing."""
        if self.mode not in self.programs:
            return RankStatus(self.mode, self.call_number, 0, None, self.call_name)
        program = self.programs[self.mode]
        awaited = self.awaited(program)
        return RankStatus(self.mode, self.call_number, program.position, awaited, self.call_name)

    def awaited(self, program: Program) -> Wait | None:
        """What the rank waits for; None if it computes."""
        between = program.current_call is None
        return (self.waiting_for or self.commit.awaited) if between else program.awaited

    def abort(self) -> None:
        """End all waits for other ranks of the pipeline, and for its replica peers, here and there."""
        if (communicator := self.communicator) is not None:
            communicator.abort()
        if self.replica_peers is not None:
            self.replica_peers.abort()

    def close(self) -> None:
        """Close all connections; pending messages are released first, see `Communicator.close`."""
        if self.replica_peers is not None:
            self.replica_peers.close()
        if self.communicator is not None:
            self.communicator = None
            self.channels.abandon()
            self.calls.abandon()
            self.commit.abandon()
        if self.monitor is not None:
            self._release()


def _release(monitor: FailureMonitor, communicator: Communicator | None) -> None:
    monitor.stop()
    if communicator is not None:
        communicator.close()


def weakly(method: Callable[..., T], default: Any = None) -> Callable[..., T]:
    """Return a function that calls a method as long as its object exists, and then returns the default."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        alive = reference()
        return default if alive is None else alive(*args)

    return call
