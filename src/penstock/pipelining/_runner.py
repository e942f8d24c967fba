"""Runs a schedule object: translates torch's calls, stages and functions to `penstock.runtime.Pipeline`."""

# ruff: noqa: SLF001 -- torch's private names

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TypeAlias, cast

from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _CustomFunctionProtocol, _PipelineContext, _PipelineSchedule
from torch.utils.hooks import RemovableHandle

from penstock.errors import PipelineError
from penstock.ir.action import Action, Kind, Overlap
from penstock.ir.graph import StageGraph
from penstock.ir.schedule import Schedule
from penstock.pipelining._orders import action_of
from penstock.pipelining.microbatch import merge_chunks
from penstock.pipelining.stage import _PipelineStage, _PipelineStageBase
from penstock.runtime import Custom, Pipeline, register_splitter
from penstock.runtime.execution.splitters import Splitter, Value

Functions: TypeAlias = Mapping[Kind, _CustomFunctionProtocol]
_NO_TARGET = object()


def _merge_spec(spec: object) -> Value:
    """How outputs are merged: by torch's spec, or along dimension 0."""
    merger = SimpleNamespace(split=len, merge=lambda parts: merge_chunks(list(parts), spec))
    return 0 if spec is None else merger  # its split is never called


class _Failure(SimpleNamespace):
    """An argument that raises `error` when the batch is split."""


def _raise_failure(failure: _Failure, *_: object) -> Value:
    raise failure.error


register_splitter(_Failure, cast("Splitter", SimpleNamespace(split=_raise_failure, merge=_raise_failure)))


class Runner:
    """The pipeline of one schedule object on this rank, from its first step on."""

    def __init__(
        self,
        owner: _PipelineSchedule,
        schedule: Schedule,
        stages: Sequence[_PipelineStageBase],
        functions: Functions,
    ) -> None:
        _require_no_skip_connections(stages[0])
        self._stages = {stage.stage_index: stage for stage in stages}
        self._loss_fn, self._functions = owner._loss_fn, functions
        self._loss_kwargs: Mapping[str, Value] = {}
        self._context: _PipelineContext
        self._pending: dict[Action, Callable[[], None]] = {}
        self._weight_runners: dict[tuple[int, int | None], Callable[..., None]] = {}
        self.losses: dict[int, Tensor] = {}
        """The losses of the last step by microbatch, on the last stage's rank."""
        deferring = any(stage.dw_builder is not None for stage in stages)
        intercepted = [*functions, *((Kind.B, Kind.I, Kind.W) if deferring else ())]
        inner = [stage.submod for stage in stages if not stage.is_last]
        hooks = [module.register_forward_hook(_list_to_tuple) for module in inner]
        self._remove_hooks = weakref.finalize(self, _remove, hooks)
        self.pipeline = Pipeline(
            {index: stage.submod for index, stage in self._stages.items()},
            schedule,
            loss=None if self._loss_fn is None else _weak(self._loss),
            average=owner.scale_grads,
            group=stages[0].group,
            device=stages[0].device,
            merge=_merge_spec(owner._output_merge_spec),
            functions=dict.fromkeys(intercepted, _weak(self._dispatch)),
        )

    def close(self) -> None:
        """Close the pipeline and remove the hooks."""
        self.pipeline.close()
        self._remove_hooks()

    @contextmanager
    def reporting_failures(self, *, training: bool) -> Iterator[None]:
        """Report an exception before the step to the other ranks, which wait for this one."""
        try:
            yield
        except Exception as error:
            failure = _Failure(error=error)
            with suppress(Exception):
                (self.pipeline.step if training else self.pipeline.eval)(failure=failure)
            del failure.error  # its traceback refers to the failure
            raise

    def run(
        self, context: _PipelineContext, loss_kwargs: Value, *, training: bool, return_outputs: bool
    ) -> Value:
        """One training or evaluation step; returns the merged outputs on the rank of the last stage."""
        self.losses.clear()
        self._context, self._loss_kwargs = context, loss_kwargs
        arg_mbs, kwarg_mbs, targets = context.arg_mbs or [], context.kwarg_mbs or [], context.target_mbs
        args = [list(each) for each in zip(*arg_mbs)]
        kwargs = {name: [each[name] for each in kwarg_mbs] for name in kwarg_mbs[0]}
        if targets is None and training:
            targets = [_NO_TARGET] * len(arg_mbs)
        # paired with the microbatch index, which the loss function does not get
        target = None if targets is None else list(enumerate(targets))
        call = self.pipeline.step if training else self.pipeline.eval
        try:
            with self._stage_methods_replaced():
                return call(*args, target=target, return_outputs=return_outputs, **kwargs).outputs
        finally:
            del self._context  # breaks the reference cycle context, schedule, runner
            self._pending.clear()
            self._weight_runners.clear()

    def _loss(self, output: Value, numbered: tuple[int, Value]) -> Tensor:
        microbatch, target = numbered
        if target is _NO_TARGET:
            raise PipelineError("the loss needs a target: pass target= to step() on the rank of the last stage")
        assert self._loss_fn is not None
        loss = self._loss_fn(output, target, **self._loss_kwargs)
        self.losses[microbatch] = loss.detach() if isinstance(loss, Tensor) else loss
        return loss

    # --- custom functions --------------------------------------------------------------------------

    def _dispatch(self, custom: Custom) -> None:
        """Call the user's function for an action, or the action itself if such a function runs it."""
        parts, function = custom.action.parts, self._functions.get(custom.action.kind)
        if function is None or parts[0] in self._pending:
            self._run_action(custom)
            return
        runs = [part.run for part in custom.parts] or [partial(self._run_action, custom)]
        self._pending.update(zip(parts, runs))
        function(action_of(custom.action), self._context)
        for part in parts:
            del self._pending[part]

    def _run_action(self, custom: Custom) -> None:
        """Run the action, and the weight-gradient runner of a stage with a `dw_builder`."""
        custom.run()
        action = custom.action
        if isinstance(action, Overlap) or not action.kind.is_backward:
            return
        builder, key = self._stages[action.stage].dw_builder, (action.stage, action.microbatch)
        if builder is not None and action.kind is not Kind.W:
            self._weight_runners[key] = builder()
        if builder is not None and action.kind is not Kind.I:
            self._weight_runners.pop(key)()

    @contextmanager
    def _stage_methods_replaced(self) -> Iterator[None]:
        """Replace the methods of stages that functions written for torch call, so that they run our actions."""
        replaced = [(stage, self._methods(stage)) for stage in self._stages.values() if self._functions]
        for stage, methods in replaced:
            vars(stage).update(methods)
        try:
            yield
        finally:
            for stage, methods in replaced:
                for name in methods:
                    delattr(stage, name)

    def _drive(self, kind: Kind, stage: int, microbatch: int | None) -> None:
        action = Action(kind, stage, microbatch)
        if action not in self._pending:
            expected = ", ".join(map(str, self._pending))
            raise PipelineError(f"a custom function runs {action}, but it replaces {expected}")
        self._pending[action]()

    def _methods(self, stage: _PipelineStageBase) -> dict[str, Value]:
        """The methods that run an action, and those that pass values between stages of the same rank."""
        index, context, drive = stage.stage_index, self._context, self._drive

        def forward_one_chunk(fwd_chunk_id: int, args: Value = (), kwargs: Value = None, **_: Value) -> Value:
            k = fwd_chunk_id
            arg_mbs, kwarg_mbs = context.arg_mbs or [], context.kwarg_mbs or []
            passed = [*(args if stage.is_first else ()), *(kwargs or {}).values()]
            expected = [*(arg_mbs[k] if stage.is_first else ()), *kwarg_mbs[k].values()]
            if len(passed) != len(expected) or any(one is not other for one, other in zip(passed, expected)):
                raise PipelineError(
                    f"the arguments of {index}F{k} differ from those of step(): change them there"
                )
            outputs: list[Value] = []
            with stage.submod.register_forward_hook(lambda *seen: outputs.append(seen[-1])):
                drive(Kind.F, index, k)
            return outputs[-1]

        def backward_one_chunk(bwd_chunk_id: int, *positional: Value, **named: Value) -> None:
            whole = positional[1] if len(positional) > 1 else named.get("full_backward", True)
            drive(Kind.B if whole else Kind.I, index, bwd_chunk_id)

        return {
            "forward_one_chunk": forward_one_chunk,
            "backward_one_chunk": backward_one_chunk,
            "backward_weight_one_chunk": lambda bwd_chunk_id, *_, **__: drive(Kind.W, index, bwd_chunk_id),
            "perform_reduce_grad": lambda *_, **__: drive(Kind.REDUCE_GRAD, index, None),
            **dict.fromkeys(("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"), _no_op),
        }


def _weak(method: Callable[..., Value]) -> Callable[..., Value]:
    """The method without a reference to its object: a runner's pipeline must not refer back to the runner."""
    reference = weakref.WeakMethod(method)

    def call(*args: Value) -> Value:
        alive = reference()
        assert alive is not None, "the pipeline runs only while its runner does"
        return alive(*args)

    return call


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _no_op(*_: object, **__: object) -> None:
    """The runtime passes values between stages of one rank."""


def _list_to_tuple(_module: nn.Module, _args: object, output: Value) -> Value:
    """Treat a list as a tuple of the next stage's arguments, as torch does."""
    return tuple(output) if type(output) is list else output


def _require_no_skip_connections(stage: _PipelineStageBase) -> None:
    """Require that each stage of a traced pipe takes exactly the outputs of the previous one, in order."""
    if not isinstance(stage, _PipelineStage):
        return
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    for (source, target), (before, node) in zip(StageGraph.chain(len(nodes)).edges, pairwise(nodes)):
        parts = [user for user in before.users if user.target is operator.getitem]
        wanted = sorted(parts, key=lambda part: int(part.args[1])) or [before]
        if [argument for argument in node.args if argument.op != "placeholder"] != wanted:
            raise PipelineError(
                f"stage {target} does not take exactly the outputs of stage {source}; skip connections "
                "are not supported: pass the values through the stages between"
            )
