"""Runs the steps of one rank; connects when needed, and again after a failure.

Pipeline          what users create and call
  StepRunner      one step after the other
    Connection    what is created anew after a failure
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import listed, printable, whole_number
from penstock.errors import BatchError, FailureKind, PenstockError, PipelineError
from penstock.runtime.batch import Batcher
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.dtensors import whole
from penstock.runtime.failure.links import FailureCause
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.failure.process_detector import connecting
from penstock.runtime.failure.report import collective_cause, collective_failure, failure_cause, failure_report
from penstock.runtime.program.program import CallType, Program, StepAbortedError
from penstock.runtime.session.agreement import COMPLETED, check_agreement
from penstock.runtime.session.connection import Connection
from penstock.runtime.session.profile import Recorder
from penstock.runtime.session.replica_peers import PipelineRecord, ReplicaPeers
from penstock.runtime.stage.microbatch import LiveActivations, StepInputs
from penstock.runtime.stage.stage import Stage
from penstock.runtime.states.writer import flush_states, register_states, request_states
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.transport_errors import TransportError, is_transport_error
from penstock.simulation.timeline import Timeline
from penstock.traces.diagnose.rank_state import RankState, Wait, WaitKind

_log = logging.getLogger("penstock")

# --- the inputs of a step ------------------------------------------------------------------------------


@dataclass
class StepInputBuilder:
    """How one rank prepares batches."""

    config: ExecutionConfig
    batcher: Batcher
    tokens: Callable[[Any], int] | None
    """Counts the tokens of a microbatch's target."""
    average: bool
    """Whether the loss of a step is the mean of the microbatches' losses, or else their sum."""
    _has_warned: bool = field(default=False, init=False)

    @property
    def loss_options(self) -> dict[str, object]:
        """What all ranks that compute a loss must have in common: how the losses are weighted."""
        if not any(sink in self.config.modules for sink in self.config.schedule.graph.sinks):
            return {}
        return {"average=": self.average, "tokens=": "none" if self.tokens is None else "given"}

    def build(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: object,
        *,
        scale: float,
        training: bool,
        keep_outputs: bool,
    ) -> StepInputs:
        """The inputs of one call of `step` or `eval`."""
        if training and not torch.is_grad_enabled():
            raise PipelineError("step() computes gradients, but gradients are disabled here: use eval()")
        schedule, modules = self.config.schedule, self.config.modules
        has_source, has_sink = (
            any(stage in modules for stage in ends) for ends in (schedule.graph.sources, schedule.graph.sinks)
        )
        if training and not self.config.losses and has_sink:
            raise PipelineError("step() needs a loss: give `loss=` to Pipeline, or use eval()")
        args = args if has_source else ()
        if has_source:
            self._check_count(args)
        rows: dict[str, int] = {}
        split_args, split_kwargs = self.batcher.split_arguments(args, kwargs, rows)
        all_rows, targets = dict(rows), None
        if target is not None and has_sink:
            targets = self.batcher.split_target(target, all_rows)
        weights = [1 / schedule.microbatches if self.average else 1.0] * len(split_args)
        if self.tokens is not None and targets is not None:
            weights = self._token_weights([int(whole(self.tokens(part))) for part in targets])
        elif targets is not None:
            self._warn_if_uneven(all_rows)
        return StepInputs(
            self._by_source(split_args),
            split_kwargs,
            targets,
            weights,
            scale=scale,
            training=training,
            keep_outputs=keep_outputs,
            rows=rows,
            target_rows={path: count for path, count in all_rows.items() if path not in rows},
        )

    def _warn_if_uneven(self, rows: Mapping[str, int]) -> None:
        """Say once that the mean over microbatches of different sizes is not that over the batch."""
        microbatches = self.config.schedule.microbatches
        uneven = [count for count in rows.values() if count % microbatches]
        if uneven and self.average and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d rows are split into %d microbatches of %d and %d rows, and each microbatch counts alike: "
                "the loss and its gradients are not those of the whole batch. Give tokens=len to Pipeline to "
                "weigh microbatches by their rows, or another number of rows",
                *(uneven[0], microbatches, uneven[0] // microbatches + 1, uneven[0] // microbatches),
            )

    def _check_count(self, args: tuple[Any, ...]) -> None:
        sources = self.config.schedule.graph.sources
        if len(sources) > 1 and len(args) != len(sources):
            raise BatchError(
                f"{len(args)} positional arguments are given, but there must be {len(sources)}, one for each "
                f"stage that takes the batch: stage {listed(sources)}, in this order. A tuple is several "
                "arguments of a stage, and None stands for those of a stage on another rank"
            )

    def _by_source(self, args: list[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
        """The arguments of each source on this rank: all of them if there is only one, else one each."""
        sources = self.config.schedule.graph.sources
        own = [(place, stage) for place, stage in enumerate(sources) if stage in self.config.modules]
        if len(sources) == 1:
            return {stage: args for _, stage in own}
        return {stage: [_as_arguments(each[place]) for each in args] for place, stage in own}

    def _token_weights(self, counts: list[int]) -> list[float]:
        """Token counts as weights. Gradients are averaged over replicas, which may have other counts."""
        replication = self.config.replication
        local = torch.tensor(sum(counts), dtype=torch.float64)
        total = float(replication.total(local, self.config.device))
        if total <= 0 or min(counts) < 0:
            raise PipelineError(
                f"the targets of the microbatches have {counts} tokens: a loss weighted by tokens needs a "
                "positive total and no negative count"
            )
        return [count * replication.count / total for count in counts]


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


# --- failed steps --------------------------------------------------------------------------------------

_RACE_SECONDS = 0.25
_BROKEN_SECONDS = 2.5


def abort_step(error: BaseException, connection: Connection, program: Program) -> BaseException:
    """Publish the cause and close all connections; return the error to raise, the same on every rank."""
    monitor = connection.monitor
    if monitor is None:
        return error
    schedules = {mode: each.schedule for mode, each in connection.programs.items()}
    monitor.handled()
    own = failure_cause(error, program, connection.config.rank, connection.status())
    cause = _cause(error, own, monitor)
    if program.communicates:
        traceback.clear_frames(error.__traceback__)  # frames refer to pending messages
    connection.abort()
    settled, statuses = monitor.settled()
    connection.close()
    is_callers = isinstance(error, PenstockError) and not program.started
    if is_callers or isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    cause = settled or cause
    if cause.process:  # it may have ended before this call
        cause = replace(cause, call_name=connection.call_name)
    report = failure_report(cause, statuses, schedules, monitor.members, monitor.ended())
    is_own = cause.reporter == monitor.detector.rank and cause.kind is FailureKind.EXCEPTION
    report.__cause__ = error if is_own else None
    return report


def race_seconds(error: BaseException) -> float:
    """Return how long an error of a stage waits for the failure elsewhere that it may follow from.

    A connection that breaks in a collective of the stage (of FSDP or tensor parallelism) always follows from
    one, which a busy machine may tell later. An error of the pipeline's own messages is a timeout here.
    """
    if is_transport_error(error) and not isinstance(error, TransportError):
        return _BROKEN_SECONDS
    return _RACE_SECONDS if isinstance(error, RuntimeError | OSError) else 0.0


def _cause(error: BaseException, own: FailureCause, monitor: FailureMonitor) -> FailureCause:
    """Return the cause that is known already, or else publish the failure of this rank."""
    if isinstance(error, StepAbortedError) or own.kind is FailureKind.LOST:
        known = monitor.wait_for_cause() or monitor.missed_cause()
    else:
        known = monitor.wait_for_cause(race_seconds(error))
    is_wait = own.kind in (FailureKind.LOST, FailureKind.TIMEOUT)
    return known or monitor.publish_cause(monitor.blamed(own) if is_wait else own)


# --- running steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """The result of `Pipeline.step` or `Pipeline.eval`."""

    loss: float | None
    """The mean of the microbatches' losses over all replicas, weighted by tokens if `tokens=` counts them, or
    their sum with `average=False`; None without a loss."""
    losses: Tensor | None
    """The loss of each microbatch of this pipeline; the sum, if several stages have a loss."""
    outputs: Any = None
    """The merged outputs, with `return_outputs=True` on the rank of the last stage; by stage, if several stages
    feed no other."""
    timeline: Timeline | None = None
    """The measured timeline of all ranks, inside `with pipeline.profile()`."""


_CLOSED = (
    "world rank {} trains the same stages and has closed its pipeline, by close() or because nothing refers to "
    "it any more, but this rank has not, and calls {}: all replicas must close their pipelines before the same "
    "call, or none"
)


def _collective(what: str) -> Wait:
    return Wait(WaitKind.COLLECTIVE, what)


class StepRunner:
    """The executor of one rank, and the source of its state files; without a folder it writes none."""

    def __init__(self, config: ExecutionConfig, ties: TiedWeights, input_builder: StepInputBuilder) -> None:
        self._config, self._ties, self._input_builder = config, ties, input_builder
        self._completed = 0
        """The number of calls of `step` and `eval` that returned a result, with the steps before a resume."""
        self._evals = 0
        """How many of them were calls of `eval`."""
        self._connection: Connection | None = None
        self._record = PipelineRecord.of(config)
        self._is_connecting = False
        self._nothing = RankState(tuple(config.members), config.members[config.rank], config.schedule)
        if config.state_dir is not None:
            register_states(self, config.state_dir)
        self.activations = LiveActivations()
        self.pool: BufferPool
        self.recorder: Recorder | None = None
        """Records the steps while the pipeline is profiled."""

    # --- connecting --------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Return the connection, created if there is none; then all ranks must do this at the same time."""
        if self._connection is None:
            self._is_connecting = True
            try:
                self._connection = self._new_connection()
            except BaseException as error:
                if self._config.state_dir is not None:
                    request_states("connecting failed", replace(self.rank_state(), error=str(error)), self)
                    flush_states()
                raise
            finally:
                self._is_connecting = False
            if self._config.state_dir is not None:
                self._connection.on_failure = weakref.WeakMethod(self._write_failure)
        return self._connection

    def _new_connection(self) -> Connection:
        self.pool = BufferPool(self._config.device)
        connection = Connection(self._config, self.activations, self.pool)
        connection.set_completed(self._completed, self.completed_steps)
        for index, stage in connection.stages.items():
            if stage.deferral is not None and stage.deferral.compiled and not self._completed:
                names = ", ".join(name or "the whole stage" for name in stage.deferral.compiled)
                text = "stage %d: the weight gradients of compiled modules are computed in I, not in W: %s"
                _log.warning(text, index, names)
        try:
            self._handshake(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _handshake(self, connection: Connection) -> None:
        """Raise unless all ranks agree on the model, the completed calls and the loss options."""
        config, communicator, problem = self._config, connection.communicator, ""
        options, record, monitor = self._input_builder.loss_options, self._record, connection.monitor
        if communicator is not None:
            with connecting(config):
                check_agreement(config, self._ties, self._completed, options, communicator)
                communicator.connect_subgroups(self._ties.rank_groups)
        record.begin(config, connection.peer_groups)
        if connection.peer_groups:
            try:
                connection.replica_peers = ReplicaPeers(config, options, record)
            except PipelineError as error:
                problem = str(error)
        if communicator is not None and dist.get_world_size() > len(config.members):
            with connecting(config):  # the other ranks of this pipeline have other replica peers
                problem = next(filter(None, communicator.exchange_texts(problem)), "")
        if problem:
            if connection.replica_peers is not None:
                connection.replica_peers.abort()
            raise PipelineError(problem)
        if monitor is not None and connection.replica_peers is not None:
            monitor.replica_peers = connection.replica_peers.ranks
        record.records.connected(record)

    def close(self) -> None:
        """Close the connection; the next step connects again."""
        connection, self._connection = self._connection, None
        self._record.is_connected = False
        if connection is not None:
            connection.close()

    def discard(self) -> None:
        """Close the connection after a failure, of which replica peers look for the cause."""
        if self._connection is not None and self._connection.replica_peers is not None:
            self._connection.replica_peers.abort()
        self.close()

    @property
    def completed_steps(self) -> int:
        """The number of calls of `step` that returned a result; every rank must set the same number."""
        return self._completed - self._evals

    @completed_steps.setter
    def completed_steps(self, steps: int) -> None:
        if (number := whole_number(steps)) is None or number < 0:
            raise PipelineError(
                f"completed_steps must be a whole number of at least 0 (given {printable(repr(steps))})"
            )
        self._completed = number + self._evals
        if self._connection is not None:
            self._connection.set_completed(self._completed, number)

    # --- running -----------------------------------------------------------------------------------

    def run(
        self, mode: str, *batch: Any, keep_outputs: bool, scale: float = 1.0, reduces: bool = True
    ) -> StepResult:
        """Run a `step`, which is forward and backward, or an `eval`, which is forward."""
        connection = self.connect()
        with ExitStack() as installed:
            for stage in connection.stages.values():
                if mode == "step" and stage.deferral is not None:
                    installed.enter_context(stage.deferral.installed())
            self.activations.reset()
            self.pool.peak = 0
            program = connection.begin(mode)
            try:
                reduced = "reduced over all ranks" if reduces else "not reduced yet, inside accumulate()"
                options = {"gradients": reduced, "loss scale": scale}
                self._config.replication.refresh()
                self._announce(connection, f"{mode}()", options)
                *_, target = batch
                peers = connection.replica_peers
                if mode == "step" or (peers and peers.has_collectives_in_eval(with_loss=target is not None)):
                    self._compare_with_peers(connection, f"{mode}()", options)
                inputs = partial(self._input_builder.build, *batch, scale=scale, keep_outputs=keep_outputs)
                result = self._run_call(connection, program, inputs, reduces=reduces)
            except BaseException as error:  # noqa: BLE001 -- the other ranks must know of every failure
                raise self._abort(error, connection, program)  # noqa: B904 -- it has its cause
            finally:
                connection.end()
        if self.recorder is not None and result.timeline is not None:
            self.recorder.keep(result.timeline)
        self._completed += 1
        self._evals += mode == "eval"
        return result

    def fail(self, error: BaseException, mode: str) -> None:
        """Fail the next step or eval with this error, which came before it."""
        connection = self.connect()
        program = connection.begin(mode)
        try:
            self._abort(error, connection, program)
        finally:
            connection.end()

    def _announce(self, connection: Connection, name: str, options: Mapping[str, object]) -> None:
        """Tell the other ranks which call this rank makes; they compare it with theirs."""
        if problem := self._record.records.problem(self._record):  # another rank expects this pipeline
            raise PipelineError(problem)
        call = {"call": name, COMPLETED: self._completed, "inside profile()": self.recorder is not None}
        connection.calls.begin({**call, **options})

    def _compare_with_peers(self, connection: Connection, name: str, options: Mapping[str, object]) -> None:
        if connection.replica_peers is not None:
            connection.waiting_for = connection.replica_peers.awaited
            step = self.completed_steps if name == "step()" else None
            call = {"call": name, "completed steps": self.completed_steps, **options}
            try:
                connection.replica_peers.compare(call, step)
            except TransportError as error:
                if closed := connection.replica_peers.closed_peers(connection.monitor):
                    raise PipelineError(_CLOSED.format(listed(closed), name)) from error
                raise
            connection.waiting_for = None

    def _run_call(
        self, connection: Connection, program: Program, build: Callable[..., StepInputs], *, reduces: bool
    ) -> StepResult:
        """Do everything that can fail; the last of it is to wait until all ranks have come so far."""
        connection.waiting_for = _collective("its replicas") if self._config.replication.count > 1 else None
        inputs = build(training=program is connection.programs["step"])
        for stage in connection.stages.values():
            stage.begin(inputs)
        connection.commit.begin()
        self._run_program(connection, program, inputs, reduces=reduces)
        outputs = self._merged_outputs(connection.sinks) if inputs.keep_outputs else None
        connection.waiting_for = _collective("the times of the other ranks")
        timeline = None if self.recorder is None else self.recorder.gathered(connection, program)
        connection.waiting_for = Wait(WaitKind.CALL, "the call of another rank")
        connection.calls.check_all()
        connection.waiting_for = None
        loss, microbatch_losses = connection.commit.finish(inputs.weights)
        return StepResult(loss, microbatch_losses, outputs=outputs, timeline=timeline)

    @contextmanager
    def collective(
        self, name: str, options: Mapping[str, object] | None = None, *, with_replica_peers: bool = True
    ) -> Iterator[Connection]:
        """Yield the connection for a collective outside of steps; raise if the ranks make different calls.

        If messages fail, the error names the rank that ended, is silent or failed.
        """
        connection = self.connect()
        monitor, is_agreed = connection.monitor, False
        connection.mode, connection.waiting_for = name, _collective("the other ranks")
        try:
            if monitor is not None:
                monitor.begin()
                monitor.raise_if_failed()
            self._announce(connection, name, options or {})
            connection.calls.check_all()
            if with_replica_peers:
                self._compare_with_peers(connection, name, options or {})
            is_agreed = True
            yield connection
        except TransportError as error:
            failure = collective_failure(name, monitor, self._config.timeout, error)
            self.discard()
            raise failure from error
        except PenstockError as error:
            if not is_agreed or isinstance(error.__cause__, TransportError):
                self.discard()
            raise  # on every rank
        except BaseException as error:
            if monitor is not None:
                monitor.publish_cause(collective_cause(error, name, self._config.rank, connection.status()))
            self.discard()  # wakes the ranks that wait for this one
            raise
        finally:
            connection.mode = "outside"

    def _merged_outputs(self, sinks: Mapping[int, Stage]) -> Any:
        """Return the output of the only sink, or of each of several by stage; None on other ranks."""
        microbatches, merged = range(self._config.schedule.microbatches), {}
        for index, sink in sinks.items():
            merged[index] = self._input_builder.batcher.merge_outputs(
                [sink.outputs.pop(i) for i in microbatches]
            )
        if len(self._config.schedule.graph.sinks) > 1:
            return merged or None
        return next(iter(merged.values()), None)

    def _run_program(
        self, connection: Connection, program: Program, inputs: StepInputs, *, reduces: bool
    ) -> None:
        """Run the actions, and before and after them the collectives of replicas and tied weights."""
        replication, training = self._config.replication, inputs.training
        replication.begin(training=training, reduces=reduces)
        if training:
            connection.waiting_for = _collective("the other ranks with its tied weights")
            self._ties.begin(connection.communicator)
        connection.waiting_for = None
        with replication.scheduled():
            if self.recorder is not None:
                self.recorder.run(connection, program)
            else:
                program.run()
            program.finish()
            connection.waiting_for = _collective("the gradients of its replicas")
            replication.finish(trained=training)
        if training:
            connection.waiting_for = _collective("the gradients of tied weights")
            self._ties.finish(connection.communicator, sums=reduces)
        connection.waiting_for = None

    def _abort(self, error: BaseException, connection: Connection, program: Program) -> BaseException:
        """Publish the failure and close the connection; return the exception to raise.

        A Ctrl-C during a wait for a message is raised only after the wait, possibly while this runs.
        """
        while True:
            try:
                connection.commit.abandon()
                self._ties.drop()
                with suppress(Exception):  # the first failure is the one to report
                    self._config.replication.drop()
                self._record.is_connected = False
                return abort_step(error, connection, program)
            except KeyboardInterrupt as interrupt:  # noqa: PERF203 -- it happens once or twice
                error = interrupt.with_traceback(None)  # which has this frame, which has the error
            finally:
                self._connection = None
                if self._config.state_dir is not None:
                    flush_states()

    # --- the state files of this rank ----------------------------------------------------------------

    def _write_failure(self, cause: FailureCause) -> None:
        """Write the state at the moment at which a failure becomes known; called on any thread."""
        is_exception = cause.kind in (FailureKind.EXCEPTION, FailureKind.INTERRUPTED)
        own = is_exception and cause.world_rank == self._nothing.world_rank
        state = replace(self.rank_state(), error=cause.message, is_origin=own)
        request_states(f"failure: {cause.kind}", state, self)

    def rank_state(self) -> RankState:
        """Return what this rank does; called on any thread."""
        connection = self._connection
        if connection is None:
            mode = "connecting" if self._is_connecting else "outside"
            steps = self.completed_steps
            return replace(self._nothing, mode=mode, step_number=steps, call_number=self._completed)
        state = replace(
            self._nothing,
            mode=connection.mode,
            step_number=connection.step_number,
            call_number=connection.call_number,
            lost={} if connection.monitor is None else connection.monitor.detector.lost(self._nothing.members),
        )
        program = connection.programs.get(state.mode)
        if program is None:
            return replace(state, waiting_for=connection.waiting_for if state.mode != "outside" else None)
        call = program.current_call
        if call is None:
            position, awaits = len(program.steps) if program.finished else -1, ""
        else:
            waits = call.type in (CallType.WAIT, CallType.RELEASE)
            position, awaits = call.position, str(call.subject) if waits else ""
        waiting_for = connection.awaited(program) if call is None else None
        return replace(
            state, schedule=program.schedule, position=position, awaits=awaits, waiting_for=waiting_for
        )

    def ask_others(self) -> None:
        """Ask all ranks of the job for their states."""
        if (connection := self._connection) is not None and connection.monitor is not None:
            connection.monitor.detector.send({"type": "state", "rank": self._nothing.world_rank})
