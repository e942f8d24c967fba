"""A schedule object at work: what torch's calls, stages and functions mean to `penstock.runtime.Pipeline`."""

# ruff: noqa: SLF001 -- what torch keeps private is what this is about

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TypeAlias, cast

from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _CustomFunctionProtocol, _PipelineContext, _PipelineSchedule

from penstock.errors import PipelineError
from penstock.ir.action import Action, Kind, Overlap
from penstock.ir.schedule import Schedule
from penstock.pipelining._orders import action_of
from penstock.pipelining.microbatch import merge_chunks
from penstock.pipelining.stage import _PipelineStage, _PipelineStageBase
from penstock.runtime import Custom, Pipeline, register_splitter
from penstock.runtime.execution.splitters import Splitter, Value

Functions: TypeAlias = Mapping[Kind, _CustomFunctionProtocol]
_NO_TARGET = object()


def _merging(spec: object) -> Value:
    """Outputs go together as a spec of torch says, or else along dimension 0."""
    way = SimpleNamespace(split=len, merge=lambda parts: merge_chunks(list(parts), spec))
    return 0 if spec is None else way  # which is never asked to split


class _Refusal(SimpleNamespace):
    """Stands for an argument that cannot be given: whoever splits it gets its `error`."""


def _raised(refusal: _Refusal, *_: object) -> Value:
    raise refusal.error


register_splitter(_Refusal, cast("Splitter", SimpleNamespace(split=_raised, merge=_raised)))


class Running:
    """The pipeline of one schedule object on this rank, from its first step on."""

    def __init__(
        self,
        owner: _PipelineSchedule,
        schedule: Schedule,
        stages: Sequence[_PipelineStageBase],
        functions: Functions,
    ) -> None:
        _refuse_skip_connections(stages[0])
        self._stages = {stage.stage_index: stage for stage in stages}
        self._loss_fn, self._functions = owner._loss_fn, functions
        self._loss_kwargs: Mapping[str, Value] = {}
        self._context: _PipelineContext
        self._driven: dict[Action, Callable[[], None]] = {}
        self._runners: dict[tuple[int, int | None], Callable[..., None]] = {}
        self.losses: dict[int, Tensor] = {}
        """The losses of the last step by microbatch, on the last stage's rank."""
        deferring = any(stage.dw_builder is not None for stage in stages)
        watched = [*functions, *((Kind.B, Kind.I, Kind.W) if deferring else ())]
        inner = [stage.submod for stage in stages if not stage.is_last]
        self._hooks = [module.register_forward_hook(_unpacked) for module in inner]
        self.pipeline = Pipeline(
            {index: stage.submod for index, stage in self._stages.items()},
            schedule,
            loss=None if self._loss_fn is None else self._loss,
            average=owner.scale_grads,
            group=stages[0].group,
            device=stages[0].device,
            merge=_merging(owner._output_merge_spec),
            functions=dict.fromkeys(watched, self._dispatch),
        )

    def close(self) -> None:
        """Hang up, and leave the modules as they were."""
        self.pipeline.close()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def telling(self, *, training: bool) -> Iterator[None]:
        """What goes wrong here before the step begins is told to the other ranks, which wait for this one."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                (self.pipeline.step if training else self.pipeline.eval)(refused=_Refusal(error=error))
            raise

    def run(
        self, context: _PipelineContext, loss_kwargs: Value, *, training: bool, return_outputs: bool
    ) -> Value:
        """One step or evaluation of microbatches; gives the merged outputs where they are."""
        self.losses.clear()
        self._context, self._loss_kwargs = context, loss_kwargs
        arg_mbs, kwarg_mbs, targets = context.arg_mbs or [], context.kwarg_mbs or [], context.target_mbs
        args = [list(each) for each in zip(*arg_mbs)]
        kwargs = {name: [each[name] for each in kwarg_mbs] for name in kwarg_mbs[0]}
        if targets is None and training:
            targets = [_NO_TARGET] * len(arg_mbs)
        # the number goes with the target, because a loss is not told which microbatch it is for
        target = None if targets is None else list(enumerate(targets))
        call = self.pipeline.step if training else self.pipeline.eval
        try:
            with self._lent():
                return call(*args, target=target, return_outputs=return_outputs, **kwargs).outputs
        finally:
            del self._context  # it has the schedule object, which has this
            self._driven.clear()
            self._runners.clear()

    def _loss(self, output: Value, numbered: tuple[int, Value]) -> Tensor:
        microbatch, target = numbered
        if target is _NO_TARGET:
            raise PipelineError("the loss needs a target: give target= to step() on the rank of the last stage")
        assert self._loss_fn is not None
        loss = self._loss_fn(output, target, **self._loss_kwargs)
        self.losses[microbatch] = loss.detach() if isinstance(loss, Tensor) else loss
        return loss

    # --- functions in place of actions -------------------------------------------------------------

    def _dispatch(self, custom: Custom) -> None:
        """Call the user's function, unless it is such a function that runs this."""
        parts, function = custom.action.parts, self._functions.get(custom.action.kind)
        if function is None or parts[0] in self._driven:
            self._work(custom)
            return
        works = [part.run for part in custom.parts] or [partial(self._work, custom)]
        self._driven.update(zip(parts, works))
        function(action_of(custom.action), self._context)
        for part in parts:
            del self._driven[part]

    def _work(self, custom: Custom) -> None:
        """The action itself, and what a stage's `dw_builder` adds to it."""
        custom.run()
        action = custom.action
        if isinstance(action, Overlap) or not action.kind.is_backward:
            return
        builder, key = self._stages[action.stage].dw_builder, (action.stage, action.microbatch)
        if builder is not None and action.kind is not Kind.W:
            self._runners[key] = builder()
        if builder is not None and action.kind is not Kind.I:
            self._runners.pop(key)()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Functions written for torch call these methods of its stages; they do what is at hand."""
        lent = [(stage, self._methods(stage)) for stage in self._stages.values() if self._functions]
        for stage, methods in lent:
            vars(stage).update(methods)
        try:
            yield
        finally:
            for stage, methods in lent:
                for name in methods:
                    delattr(stage, name)

    def _drive(self, kind: Kind, stage: int, microbatch: int | None) -> None:
        action = Action(kind, stage, microbatch)
        if action not in self._driven:
            there = ", ".join(map(str, self._driven))
            raise PipelineError(f"a function runs {action}, but it stands in for {there}")
        self._driven[action]()

    def _methods(self, stage: _PipelineStageBase) -> dict[str, Value]:
        """Those that run an action, and those that hand values to a neighbour on the same rank."""
        index, context, drive = stage.stage_index, self._context, self._drive

        def forward_one_chunk(fwd_chunk_id: int, args: Value = (), kwargs: Value = None, **_: Value) -> Value:
            k = fwd_chunk_id
            arg_mbs, kwarg_mbs = context.arg_mbs or [], context.kwarg_mbs or []
            given = [*(args if stage.is_first else ()), *(kwargs or {}).values()]
            known = [*(arg_mbs[k] if stage.is_first else ()), *kwarg_mbs[k].values()]
            if len(given) != len(known) or any(one is not other for one, other in zip(given, known)):
                raise PipelineError(
                    f"the arguments of {index}F{k} are those that step() got: change them there"
                )
            outputs: list[Value] = []
            with stage.submod.register_forward_hook(lambda *seen: outputs.append(seen[-1])):
                drive(Kind.F, index, k)
            return outputs[-1]

        def backward_one_chunk(bwd_chunk_id: int, *given: Value, **named: Value) -> None:
            whole = given[1] if len(given) > 1 else named.get("full_backward", True)
            drive(Kind.B if whole else Kind.I, index, bwd_chunk_id)

        return {
            "forward_one_chunk": forward_one_chunk,
            "backward_one_chunk": backward_one_chunk,
            "backward_weight_one_chunk": lambda bwd_chunk_id, *_, **__: drive(Kind.W, index, bwd_chunk_id),
            "perform_reduce_grad": lambda *_, **__: drive(Kind.REDUCE_GRAD, index, None),
            **dict.fromkeys(("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"), _nothing),
        }


def _nothing(*_: object, **__: object) -> None:
    """Stages on one rank hand values over by themselves."""


def _unpacked(_module: nn.Module, _args: object, output: Value) -> Value:
    """Torch takes a list for a tuple: the next stage's arguments."""
    return tuple(output) if type(output) is list else output


def _refuse_skip_connections(stage: _PipelineStageBase) -> None:
    """In a traced pipe every stage must take just what the one before it gives, in that order."""
    if not isinstance(stage, _PipelineStage):
        return
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    for index, (before, node) in enumerate(pairwise(nodes)):
        parts = [user for user in before.users if user.target is operator.getitem]
        wanted = sorted(parts, key=lambda part: int(part.args[1])) or [before]
        if [argument for argument in node.args if argument.op != "placeholder"] != wanted:
            raise PipelineError(
                f"stage {index + 1} does not take just what stage {index} gives, and values that skip a stage "
                "are not carried: hand them through the stages between"
            )
