"""`Pipeline`: the stages of this rank, a schedule, and a process group, ready to train and to evaluate.

Every rank of the group makes one, with the same schedule, and calls `step` and `eval` in the same order:

    schedule = penstock.build("1f1b", ranks=2, microbatches=8)
    pipeline = Pipeline(split(model, at=["4"]), schedule, loss=cross_entropy)
    for x, y in batches:
        result = pipeline.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.action import Kind
from penstock.errors import PenstockError, PipelineError
from penstock.runtime import setup
from penstock.runtime.buffers import Pool
from penstock.runtime.failure import cause_of, failed
from penstock.runtime.losses import Losses
from penstock.runtime.microbatches import Batcher
from penstock.runtime.profile import Profile, Recorder
from penstock.runtime.program import CustomFunction, Program, StoppedError
from penstock.runtime.records import Live, StepInputs
from penstock.runtime.result import StepResult
from penstock.runtime.splitters import Splitter
from penstock.runtime.stage import Stage
from penstock.runtime.states import evaluating, kept_random_state
from penstock.runtime.watch import Cause, Status
from penstock.runtime.wiring import Plan, Wiring
from penstock.schedule import Schedule

__all__ = ["Pipeline"]

_log = logging.getLogger("penstock")
_TELL_WITHIN = 1.0  # seconds that ranks have to say what they were doing


class Pipeline:
    """This rank's part of a pipeline.

    `stages`      the modules of this rank's stages in the order of the stages, or a mapping from the number of
                  a stage to its module, which may name all stages, as `split` does: each rank takes its own
    `schedule`    a family's name, a `.csv` or `.json` file, or a `Schedule`, lowered or not
    `microbatches`  how many; needed with a family's name
    `loss`        called with the last stage's output and, if there is one, the target; gives one number
    `tokens`      counts the tokens of a microbatch's target; the loss is then weighted by them
    `group`       a process group or one dimension of a DeviceMesh; all ranks unless given
    `device`      where the messages are; that of the first parameter unless given
    `split`, `merge`  how arguments come apart and outputs go together, see `Batcher`
    `functions`   called in place of actions of a kind, see `Custom`
    `check_finite`  fail at the first number that is not finite, and name where it arose
    `timeout`     seconds that a rank waits for another
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        schedule: Schedule | str | PathLike[str],
        *,
        microbatches: int | None = None,
        loss: Callable[..., Tensor] | None = None,
        tokens: Callable[[Any], int] | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        split: Mapping[int | str, int | Splitter] | None = None,
        merge: int | Splitter = 0,
        functions: Mapping[Kind | str, CustomFunction] | None = None,
        check_finite: bool = False,
        timeout: float = 300,
    ) -> None:
        if not timeout > 0:
            raise PipelineError(f"a timeout is a number of seconds above 0 (given {timeout!r})")
        members, rank = setup.members_of(group)
        self.schedule = setup.lowered(setup.chosen_schedule(schedule, stages, len(members), microbatches))
        """The schedule that runs, with all its communication."""
        self.rank = rank
        """This rank's number in the pipeline."""
        modules = setup.modules_of_rank(stages, self.schedule, rank)
        chosen = torch.device(device) if device is not None else setup.device_of(modules.values())
        self._plan = Plan(
            self.schedule, rank, members, chosen, timedelta(seconds=timeout), setup.functions_by_kind(functions)
        )
        self._loss, self._tokens, self._checks = loss, tokens, check_finite
        self._batcher = Batcher(self.schedule.microbatches, split, merge)
        self._live = Live()
        self._modules = modules
        self._steps = 0
        self._wiring: Wiring | None = None
        self._recorder: Recorder | None = None
        self._connect()

    # --- what users call ---------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch: gradients are added to the parameters' `.grad`.

        `args` matter on the rank of the first stage, `target` on that of the last, keyword arguments on every
        stage of the rank they are given on. A list is taken as ready microbatches. Every rank may be given all.
        """
        if not self.schedule.columns.has(Kind.B, Kind.I):
            return self.eval(*args, target=target, return_outputs=return_outputs, **kwargs)
        self._connect()  # a new connection comes with new stages
        with ExitStack() as installed:
            for stage in self._stages.values():
                if stage.deferral is not None:
                    installed.enter_context(stage.deferral.installed())
            return self._run("step", args, kwargs, target, return_outputs=return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward of one batch, with the modules in eval mode; with a target, the loss too.

        It builds no graph and changes no gradient, no buffer and no random state.
        """
        with torch.no_grad(), evaluating(self._modules.values()), kept_random_state(self._plan.device):
            return self._run("eval", args, kwargs, target, return_outputs=return_outputs)

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Record the steps inside: their timelines, on every rank, and the costs that follow from them."""
        if self._recorder is not None:
            raise PipelineError("this pipeline is being profiled already")
        self._recorder = Recorder(self._connect())
        try:
            yield self._recorder.profile
        finally:
            self._recorder = None

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank by the number of their stage."""
        return self._modules

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once: what to give to an optimizer."""
        return iter(dict.fromkeys(p for module in self._modules.values() for p in module.parameters()))

    @property
    def peak_live_activations(self) -> int:
        """The most microbatches' activations this rank held at once in its last step."""
        return self._live.peak

    @property
    def peak_buffers(self) -> int:
        """The most message buffers this rank used at once in its last step."""
        return self._pool.peak

    def __enter__(self) -> Pipeline:  # noqa: PYI034 -- Self comes with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        own = ", ".join(map(str, self._modules))
        return f"<Pipeline {self.schedule.name}: rank {self.rank} of {self.schedule.num_ranks}, stage {own}>"

    def close(self) -> None:
        """Hang up. The pipeline connects again when it is used again."""
        if self._wiring is not None:
            wiring, self._wiring = self._wiring, None
            self._finalizer.detach()
            wiring.close()

    # --- running -----------------------------------------------------------------------------------

    @property
    def _has_last(self) -> bool:
        return self.schedule.num_stages - 1 in self._modules

    def _connect(self) -> Wiring:
        """Make channels and programs; all ranks do this together."""
        if self._wiring is not None:
            return self._wiring
        split = setup.split_microbatches(self.schedule)
        self._pool = Pool(self._plan.device)
        count = self.schedule.num_stages
        self._stages = {
            index: Stage(
                index, count, module, self._live, self._pool, split=split.get(index, ()), checks=self._checks
            )
            for index, module in self._modules.items()
        }
        self._say_what_is_compiled()
        if self._has_last:
            self._stages[count - 1].loss = self._loss
        wiring = Wiring(self._plan, self._stages, self._pool)
        if wiring.links is not None:
            try:
                setup.refuse_disagreement(self._plan, wiring.links)
            except PipelineError:
                wiring.close()
                raise
        self._wiring = wiring
        self._finalizer = weakref.finalize(self, wiring.close)
        return wiring

    def _say_what_is_compiled(self) -> None:
        for index, stage in self._stages.items():
            if stage.deferral is not None and stage.deferral.compiled and not self._steps:
                names = ", ".join(name or "all of it" for name in stage.deferral.compiled)
                text = "stage %d: the weight gradients of compiled modules are computed in I, not in W: %s"
                _log.warning(text, index, names)

    def _run(
        self, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: object, *, return_outputs: bool
    ) -> StepResult:
        wiring = self._connect()
        self._steps += 1
        self._live.now = self._live.peak = self._pool.peak = 0
        program = wiring.begin(mode, self._steps)
        last = self._stages.get(self.schedule.num_stages - 1)
        losses = Losses(wiring, self.schedule, last)
        try:
            inputs = self._inputs(mode, args, kwargs, target, keep_outputs=return_outputs)
            for stage in self._stages.values():
                stage.begin(inputs)
            losses.begin()
            if self._recorder is not None:
                self._recorder(program)
            else:
                program.run()
            outputs = None
            if return_outputs and last is not None:
                outputs = self._batcher.merged([last.outputs[i] for i in range(self.schedule.microbatches)])
                last.outputs.clear()
            program.finish()
            found = losses.everywhere(inputs.weights)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks must know
            failure = self._told(error, wiring, program, losses)
            raise failure from failure.__cause__
        finally:
            wiring.end()
        timeline = None if self._recorder is None else self._recorder.gathered(wiring, program)
        return StepResult(*found, outputs=outputs, timeline=timeline)

    def _inputs(
        self, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: object, *, keep_outputs: bool
    ) -> StepInputs:
        """The batch in microbatches, and how much each counts."""
        if mode == "step" and not torch.is_grad_enabled():
            raise PipelineError("step() computes gradients, but they are switched off here; use eval()")
        if mode == "step" and self._loss is None and self._has_last:
            raise PipelineError("step() needs a loss: give `loss=` to Pipeline, or use eval()")
        m = self.schedule.microbatches
        split_args, split_kwargs = self._batcher.arguments(args if 0 in self._modules else (), kwargs)
        targets = None if target is None or not self._has_last else self._batcher.target(target)
        weights = [1 / m] * m
        if self._tokens is not None and targets is not None:
            counts = [int(self._tokens(part)) for part in targets]
            if sum(counts) <= 0 or min(counts) < 0:
                raise PipelineError(
                    f"the microbatches' targets have {counts} tokens: there is nothing to weigh"
                )
            weights = [count / sum(counts) for count in counts]
        return StepInputs(
            split_args, split_kwargs, targets, weights, training=mode == "step", keep_outputs=keep_outputs
        )

    def _told(self, error: BaseException, wiring: Wiring, program: Program, losses: Losses) -> BaseException:
        """Tell the others and hang up; gives what to raise.

        A Ctrl-C that came while a message was waited for is raised only now, perhaps in the midst of this.
        """
        while True:
            try:
                losses.drop()
                return self._failure(error, wiring, program)
            except KeyboardInterrupt as pressed:  # noqa: PERF203 -- it is pressed once or twice
                error = pressed

    def _failure(self, error: BaseException, wiring: Wiring, program: Program) -> BaseException:
        self._wiring = None
        self._finalizer.detach()
        watch = wiring.watch
        if watch is None:
            return error
        schedules = {mode: each.schedule for mode, each in wiring.programs.items()}
        cause = self._cause(error, wiring, program)
        with suppress(RuntimeError):  # the store may be gone by now, but the cause is known
            watch.tell_status()
        if program.communicates:
            # frames hold on to messages, and those to the connections
            traceback.clear_frames(error.__traceback__)
        wiring.close()
        statuses: dict[int, Status] = {}
        with suppress(RuntimeError):
            statuses = watch.statuses(_TELL_WITHIN)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return error
        if isinstance(error, PenstockError) and program.at < 0:
            return error
        report = failed(cause, statuses, schedules)
        if cause.rank == self.rank and cause.kind == "exception":
            report.__cause__ = error
        return report

    def _cause(self, error: BaseException, wiring: Wiring, program: Program) -> Cause:
        """What somebody wrote down, or what went wrong here."""
        watch = wiring.watch
        assert watch is not None
        mine = cause_of(error, program, self.rank, self._steps, wiring.waits_for(program))
        try:
            if isinstance(error, StoppedError) or mine.kind == "lost":
                found = watch.wait_for_cause()
                if found is not None:
                    return found
            return watch.tell(mine)
        except RuntimeError:
            known = watch.cause or (mine if mine.kind == "exception" else None)
            return known or _lost_store(self._steps)


def _lost_store(step: int) -> Cause:
    message = (
        "the connection to the job's key-value store broke, so the process that hosts it is gone: rank 0 of "
        "the world, or the agent of torchrun"
    )
    return Cause(-1, "lost", step, "", None, None, message, "")
