"""What runs a rank's steps: connected when it is needed, and made anew after a failure.

Pipeline    what users make and call
  Engine    stages, buffers and connections of one rank; one step after the other
    Wiring  the part that lives as long as its connections do
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor, nn

from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.execution.connections import Plan, Wiring
from penstock.runtime.execution.losses import Losses
from penstock.runtime.execution.microbatch_state import Live, StepInputs
from penstock.runtime.execution.profile import Recorder
from penstock.runtime.execution.program import Program
from penstock.runtime.execution.result import StepResult
from penstock.runtime.execution.stage import Stage
from penstock.runtime.execution.step_inputs import Intake
from penstock.runtime.failure.abort import hang_up
from penstock.runtime.failure.agreement import refuse_disagreement
from penstock.runtime.transport.buffer_pool import Pool

__all__ = ["Engine"]

_log = logging.getLogger("penstock")


class Engine:
    """One rank's; `trained` are its modules and the loss, if that has parameters."""

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        ties: TiedWeights,
        intake: Intake,
        *,
        loss: Callable[..., Tensor] | None,
        checks: bool,
        trained: Mapping[int, nn.Module],
    ) -> None:
        self._plan, self._modules, self._ties, self._intake = plan, modules, ties, intake
        self._loss, self._checks, self._trained = loss, checks, trained
        self._split = _split_microbatches(plan.schedule)
        self._steps = 0
        self._wiring: Wiring | None = None
        self.live = Live()
        self.pool: Pool
        self.recorder: Recorder | None = None
        """Watches the steps, if somebody wants it."""
        self._stages: dict[int, Stage]

    # --- connections -------------------------------------------------------------------------------

    def connect(self) -> Wiring:
        """Make stages, channels and programs, if they are not there; all ranks do this together."""
        if self._wiring is not None:
            return self._wiring
        self.pool = Pool(self._plan.device)
        self._stages = {index: self._stage(index, module) for index, module in self._modules.items()}
        self._say_what_is_compiled()
        wiring = Wiring(self._plan, self._stages, self.pool)
        if wiring.links is not None:
            try:
                refuse_disagreement(self._plan, self._ties, self._modules, self._trained, wiring.links)
                wiring.links.connect_holders(self._plan.rank, self._ties.rank_groups, self._plan.timeout)
            except (PipelineError, RuntimeError):
                wiring.close()
                raise
        self._wiring = wiring
        self._finalizer = weakref.finalize(self, wiring.close)
        return wiring

    def _stage(self, index: int, module: nn.Module) -> Stage:
        count, replication = self._plan.schedule.num_stages, self._plan.replication
        split = self._split.get(index, ())
        stage = Stage(index, count, module, self.live, self.pool, split=split, checks=self._checks)
        stage.shards = replication.shards.get(index)
        stage.is_replicated = replication.count > 1
        if stage.is_last:
            stage.loss = self._loss
        return stage

    def _say_what_is_compiled(self) -> None:
        for index, stage in self._stages.items():
            if stage.deferral is not None and stage.deferral.compiled and not self._steps:
                names = ", ".join(name or "all of it" for name in stage.deferral.compiled)
                text = "stage %d: the weight gradients of compiled modules are computed in I, not in W: %s"
                _log.warning(text, index, names)

    def close(self) -> None:
        """Hang up; what is used again connects again."""
        if (wiring := self._wiring) is not None:
            self._forget()
            wiring.close()

    def _forget(self) -> None:
        self._wiring = None
        self._finalizer.detach()

    # --- running -----------------------------------------------------------------------------------

    def step(self, *batch: Any, scale: float, reduces: bool, keep_outputs: bool) -> StepResult:
        """Forward and backward."""
        self.connect()  # a new connection comes with new stages
        with ExitStack() as installed:
            for stage in self._stages.values():
                if stage.deferral is not None:
                    installed.enter_context(stage.deferral.installed())
            return self._run("step", batch, scale=scale, reduces=reduces, keep_outputs=keep_outputs)

    def eval(self, *batch: Any, keep_outputs: bool) -> StepResult:
        """Forward."""
        return self._run("eval", batch, scale=1.0, reduces=True, keep_outputs=keep_outputs)

    def _run(
        self, mode: str, batch: tuple[Any, ...], *, scale: float, reduces: bool, keep_outputs: bool
    ) -> StepResult:
        wiring, training = self.connect(), mode == "step"
        self._steps += 1
        self.live.now = self.live.peak = self.pool.peak = 0
        program = wiring.begin(mode, self._steps)
        last = self._stages.get(self._plan.schedule.num_stages - 1)
        losses = Losses(wiring, self._plan.schedule, last)
        try:
            inputs = self._intake(*batch, scale=scale, training=training, keep_outputs=keep_outputs)
            for stage in self._stages.values():
                stage.begin(inputs)
            losses.begin()
            self._run_program(wiring, program, inputs, reduces=reduces)
            outputs = None
            if keep_outputs and last is not None:
                outputs = self._intake.batcher.merged([last.outputs[i] for i in range(len(inputs.weights))])
                last.outputs.clear()
            found = losses.everywhere(inputs.weights)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks must know
            failure = self._told(error, wiring, program, losses)
            raise failure from failure.__cause__
        finally:
            wiring.end()
        timeline = None if self.recorder is None else self.recorder.gathered(wiring, program)
        return StepResult(*found, outputs=outputs, timeline=timeline)

    def _run_program(self, wiring: Wiring, program: Program, inputs: StepInputs, *, reduces: bool) -> None:
        """The actions, and what holders and replicas of this rank's weights do together around them."""
        replication, training = self._plan.replication, inputs.training
        replication.begin(training=training, reduces=reduces)
        if training:
            wiring.waiting = "the other holders of its tied weights"
            self._ties.begin(wiring.links)
        wiring.waiting = ""
        with replication.scheduled():
            if self.recorder is not None:
                self.recorder(program)
            else:
                program.run()
            program.finish()
            wiring.waiting = "the gradients of its replicas"
            replication.finish(trained=training)
        if training:
            wiring.waiting = "the gradients of tied weights"
            self._ties.finish(wiring.links, sums=reduces)
        wiring.waiting = ""

    def _told(self, error: BaseException, wiring: Wiring, program: Program, losses: Losses) -> BaseException:
        """Tell the others and hang up; gives what to raise.

        A Ctrl-C that came while a message was waited for is raised only now, perhaps in the midst of this.
        """
        while True:
            try:
                losses.drop()
                self._ties.drop()
                with suppress(Exception):  # what failed first is what is told
                    self._plan.replication.drop()
                self._forget()
                return hang_up(error, wiring, program)
            except KeyboardInterrupt as pressed:  # noqa: PERF203 -- it is pressed once or twice
                error = pressed


def _split_microbatches(schedule: Schedule) -> dict[int, set[int]]:
    """Per stage: the microbatches whose backward is split."""
    table = schedule.table
    which = table.of_kind(Kind.I)
    found: dict[int, set[int]] = {}
    for stage, microbatch in zip(table.stage[which].tolist(), table.microbatch[which].tolist()):
        found.setdefault(stage, set()).add(microbatch)
    return found
