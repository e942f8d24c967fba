"""Runs a schedule object: translates torch's calls, stages and functions to `penstock.runtime.Pipeline`."""

# ruff: noqa: ARG002, FBT001, FBT002 -- torch's signatures

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.schedules import (
    _Action,
    _CustomFunctionProtocol,
    _PipelineContext,
    _PipelineSchedule,
)
from torch.fx import Node
from torch.utils.hooks import RemovableHandle

from penstock.arguments import listed
from penstock.errors import PenstockError, PipelineError
from penstock.ir.action import Action, Overlap, Step
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.pipelining import stage as stages_untyped
from penstock.pipelining._orders import action_of
from penstock.pipelining.stage import _PipelineStage, _PipelineStageBase
from penstock.runtime import ActionCall, Pipeline
from penstock.runtime.batch import Value
from penstock.runtime.session.connection import weakly

Functions: TypeAlias = Mapping[Kind, _CustomFunctionProtocol]
Picks: TypeAlias = tuple[tuple[int, int], ...]
"""Per argument of a stage: the stage that returns it, and its position there."""

_NO_TARGET = object()
_PACKAGES = ("torch.distributed.pipelining", "penstock.pipelining")

_UNUSED_OF_SCHEDULES = ("_initialize_stage", "_initialize_stages", "_maybe_compute_loss", "_maybe_get_loss")
"""Methods of schedules that torch calls in every step and Penstock does not."""

_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "forward_one_chunk": (Kind.F,),
    "backward_one_chunk": (Kind.B, Kind.I),
    "backward_weight_one_chunk": (Kind.W,),
    "perform_reduce_grad": (Kind.REDUCE_GRAD,),
}
"""The methods of stages that run actions of these kinds."""

_FORWARD = "forward_maybe_with_nosync"
"""The method that calls the module."""

_UNUSED_OF_STAGES = (
    "backward_maybe_with_nosync",
    "scale_grads",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "set_local_fwd_input",
    "get_local_bwd_output",
    "set_local_bwd_input",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "clear_runtime_states",
    # torch 2.15
    "start_gradient_reduction",
    "wait_for_gradient_reduction",
    "release_fwd_send_outputs",
)
"""The methods of stages for which the runtime has its own way."""


class _StepMethods(_PipelineStageBase):
    """The methods of a stage during a step: those that run an action in torch run the action of the runner."""

    _driver: Runner

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Value = (), kwargs: Value = None, save_forward_output: bool = True
    ) -> Value:
        return self._driver.drive_forward(self, fwd_chunk_id, args, kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Value = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._driver.drive(Kind.B if full_backward else Kind.I, self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._driver.drive(Kind.W, self.stage_index, bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._driver.drive(Kind.REDUCE_GRAD, self.stage_index, None)

    def start_gradient_reduction(self) -> None:
        self._driver.drive(Kind.REDUCE_GRAD, self.stage_index, None)

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        self._driver.drive(Kind.WAIT_REDUCE_GRAD, self.stage_index, None)

    def _ignore(self, *_: Value) -> None:
        """Do nothing: the runtime passes values between stages of one rank, and releases what was sent."""

    set_local_fwd_input = get_local_bwd_output = set_local_bwd_input = _ignore  # type: ignore[assignment]
    release_fwd_send_outputs = _ignore


class _StageForward(nn.Module):
    """A stage's module, called by the stage's own `forward_maybe_with_nosync`, in its context if it has one."""

    def __init__(self, stage: _PipelineStageBase, microbatches: Mapping[int, int]) -> None:
        super().__init__()
        self.submod = stage.submod
        self._stage, self._microbatches = stage, microbatches

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        stage: Value = self._stage
        if not _has_context(stage):
            return stage.forward_maybe_with_nosync(*args, **kwargs)
        index = stage.stage_index
        about = stages_untyped.PipelineStageInfo(stage_index=index, microbatch_index=self._microbatches[index])
        return stage._call_with_forward_context(about, stage.forward_maybe_with_nosync, *args, **kwargs)


def _has_context(stage: _PipelineStageBase) -> bool:
    """Whether `register_forward_context` of torch 2.15 was called."""
    return hasattr(_PipelineStageBase, "register_forward_context") and bool(vars(stage)["_forward_contexts"])


def _overrides(stage: _PipelineStageBase, name: str) -> bool:
    """Whether a subclass of torch's stages has a method of its own in place of one of theirs."""
    torchs = next(each for each in type(stage).__mro__ if each.__module__ == _PipelineStageBase.__module__)
    return hasattr(torchs, name) and getattr(type(stage), name) is not getattr(torchs, name)


def _ignored(what: str, remedy: str) -> PipelineError:
    return PipelineError(f"{what}, which would be ignored: {remedy}")


def _check_stages(stages: Iterable[_PipelineStageBase]) -> None:
    """Raise if methods of a stage were replaced in a way that would be ignored."""
    for stage in stages:
        unused = [name for name in _UNUSED_OF_STAGES if _overrides(stage, name) or name in vars(stage)]
        if unused:
            raise _ignored(
                f"stage {stage.stage_index} overrides {', '.join(unused)}",
                "Penstock sends messages, runs backwards and scales gradients itself; change the module "
                "instead, or register a function for an action",
            )
        if patched := [name for name in (*_KINDS, _FORWARD) if name in vars(stage)]:
            what = f"{', '.join(patched)} of stage {stage.stage_index} is replaced on the object"
            raise _ignored(what, "override it in a subclass of PipelineStage that calls super()")


@contextmanager
def _stages_driven_by(driver: Runner, stages: Iterable[_PipelineStageBase]) -> Iterator[None]:
    """Let methods of these stages that run an action in torch run the action of the driver.

    An override in a subclass calls them by `super()`, which reads the class and not the object: so each stage
    has a class of the step, in which `_StepMethods` comes between the user's classes and torch's.
    """
    classes = [(stage, type(stage)) for stage in stages]
    for stage, own in classes:
        stage.__class__ = type(own.__name__, (own, _StepMethods), {"__module__": own.__module__})
        vars(stage)["_driver"] = driver
    try:
        yield
    finally:
        for stage, own in classes:
            stage.__class__ = own
            del vars(stage)["_driver"]


class Runner:
    """The pipeline of one schedule object on this rank, from its first step on."""

    def __init__(
        self,
        owner: _PipelineSchedule,
        schedule: Schedule,
        stages: Sequence[_PipelineStageBase],
        functions: Functions,
    ) -> None:
        self._traced = _traced_graph(stages[0])
        self._stages = {stage.stage_index: stage for stage in stages}
        self._built_in = self._values_of(owner)
        self._forwards: dict[int, int] = {}
        """By stage: the microbatch of its last forward, kept for stages that have a context."""
        self._in_context = {stage.stage_index for stage in stages if _has_context(stage)}
        own = {stage.stage_index for stage in stages if _overrides(stage, _FORWARD)} | self._in_context
        self._modules = {
            index: _StageForward(stage, self._forwards) if index in own else stage.submod
            for index, stage in self._stages.items()
        }
        self._functions = functions
        self._loss_kwargs: Mapping[str, Value] = {}
        self._context: _PipelineContext
        self._pending: dict[Action, Callable[[], None]] = {}
        self._driven: set[Action] = set()
        self._finished: Counter[int] = Counter()
        self._keeps_outputs = True
        self._weight_runners: dict[tuple[int, int | None], Callable[..., None]] = {}
        self.losses: dict[int, Tensor] = {}
        """The losses of the last step by microbatch, on the last stage's rank."""
        overridden = [name for name in _KINDS if any(_overrides(stage, name) for stage in stages)]
        self._is_driven = bool(functions or overridden)
        deferring = any(stage.dw_builder is not None for stage in stages)
        intercepted = [*functions, *((Kind.B, Kind.I, Kind.W) if deferring else ())]
        intercepted += [Kind.F] if self._in_context else []
        intercepted += [kind for name in overridden for kind in _KINDS[name]]
        self._remove_hooks = weakref.finalize(self, _remove, self._register_hooks())
        self.pipeline = Pipeline(
            self._modules,
            schedule if self._traced is None else schedule.over(self._traced.graph),
            # the pipeline must not refer back to the runner
            loss=None if owner._loss_fn is None else weakly(self._loss),
            average=owner.scale_grads,
            group=stages[0].group,
            device=stages[0].device,
            merge=_merger(owner),
            functions=dict.fromkeys(intercepted, weakly(self._dispatch)),
        )

    def _register_hooks(self) -> list[RemovableHandle]:
        """Hooks of the modules that turn outputs into what the next stage takes."""
        if self._traced is not None:
            named = self._modules.items()
            return [hook for index, module in named for hook in self._traced.hooks(index, module)]
        inner = [module for index, module in self._modules.items() if not self._stages[index].is_last]
        return [module.register_forward_hook(_list_to_tuple) for module in inner]

    def close(self) -> None:
        """Close the pipeline and remove the hooks."""
        self.pipeline.close()
        self._remove_hooks()

    def _values_of(self, owner: _PipelineSchedule) -> dict[str, Value]:
        """What the pipeline has built in, by name: it must not change after the first step."""
        stages = self._stages.items()
        return {
            "_n_microbatches": owner._n_microbatches,
            "scale_grads": owner.scale_grads,
            "_output_merge_spec": owner._output_merge_spec,
            "_loss_fn": owner._loss_fn is None,
            **{f"submod of stage {index}": stage.submod for index, stage in stages},
            **{f"dw_builder of stage {index}": stage.dw_builder is None for index, stage in stages},
        }

    def check_unchanged(self, owner: _PipelineSchedule) -> None:
        """Raise if something was replaced since the first step, or overridden, that would be ignored."""
        _check_stages(self._stages.values())
        late = {index for index, stage in self._stages.items() if _has_context(stage)} - self._in_context
        if late:
            what = f"stage {listed(sorted(late))} got a context of its forward after the first step"
            raise _ignored(what, "call register_forward_context before it, or create another schedule object")
        now = self._values_of(owner)
        if changed := [name for name, value in now.items() if value != self._built_in[name]]:
            what = f"{listed(changed)} changed after the first step"
            raise _ignored(what, "create another schedule object with these stages")
        methods = {name: getattr(type(owner), name, None) for name in _UNUSED_OF_SCHEDULES}
        own = [
            name
            for name, method in methods.items()
            if name in vars(owner) or (method is not None and not method.__module__.startswith(_PACKAGES))
        ]
        if own:
            raise _ignored(
                f"{type(owner).__name__} overrides {', '.join(own)}",
                "Penstock needs no trial step, and computes losses in the last stage's forward; override "
                "_compute_loss, or _step_microbatches to run steps on torch's stages",
            )

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return "_context" in vars(self)

    @contextmanager
    def reporting_failures(self, *, training: bool) -> Iterator[None]:
        """Report an exception before the step to the other ranks, which wait for this one."""
        try:
            yield
        except Exception as error:
            with suppress(PenstockError):  # the other ranks cannot be reached, so they do not wait
                self.pipeline.fail(error, training=training)
            raise

    def run(
        self,
        context: _PipelineContext,
        loss_kwargs: Value,
        *,
        training: bool,
        return_outputs: bool,
        reduces: bool,
    ) -> Value:
        """Run a training or evaluation step; return the merged outputs on the rank of the last stage."""
        self.losses.clear()
        self._finished.clear()
        self._context, self._loss_kwargs, self._keeps_outputs = context, loss_kwargs, return_outputs
        arg_mbs, kwarg_mbs, targets = context.arg_mbs or [], context.kwarg_mbs or [], context.target_mbs
        args = [list(each) for each in zip(*arg_mbs)]
        kwargs = {name: [each[name] for each in kwarg_mbs] for name in kwarg_mbs[0]}
        if targets is None and training:
            targets = [_NO_TARGET] * len(arg_mbs)
        # paired with the microbatch index, which the loss function does not get
        target = None if targets is None else list(enumerate(targets))
        call = self.pipeline.step if training else self.pipeline.eval
        try:
            with (
                nullcontext() if reduces else self.pipeline.accumulate(),
                _stages_driven_by(self, self._stages.values() if self._is_driven else ()),
            ):
                return call(*args, target=target, return_outputs=return_outputs, **kwargs).outputs
        finally:
            del self._context  # breaks the reference cycle context, schedule, runner
            self._pending.clear()
            self._weight_runners.clear()

    def _loss(self, output: Value, numbered: tuple[int, Value]) -> Tensor:
        microbatch, target = numbered
        if target is _NO_TARGET:
            raise PipelineError("the loss needs a target: pass target= to step() on the rank of the last stage")
        owner: Value = self._context.schedule_ref
        loss: Tensor = owner._compute_loss(output, target, self._loss_kwargs)
        self.losses[microbatch] = loss.detach() if isinstance(loss, Tensor) else loss
        return loss

    # --- functions for actions ---------------------------------------------------------------------

    def _dispatch(self, custom: ActionCall) -> None:
        """Call the user's function for an action, or the action itself if such a function runs it."""
        parts, function = custom.action.parts, self._function(custom.action)
        if function is None or parts[0] in self._pending:
            self._run_action(custom)
            return
        runs = [part.run for part in custom.parts] or [partial(self._run_action, custom)]
        self._pending.update(zip(parts, runs))
        self._driven.difference_update(parts)
        function(action_of(custom.action), self._context)
        for part in parts:
            del self._pending[part]
        missing = [part for part in parts if part.kind in PASS_KINDS and part not in self._driven]
        if missing:
            raise PipelineError(
                f"the function or method for {custom.action} did not run {listed(missing)}: let it call the "
                "stage's method, such as stage.forward_one_chunk, or super() in an override"
            )

    def _function(self, action: Step) -> Callable[[_Action, _PipelineContext], None] | None:
        """The registered function for an action, or else the overridden method of its stage."""
        function = self._functions.get(action.kind)
        if function is None and isinstance(action, Action):
            names = [name for name, kinds in _KINDS.items() if action.kind in kinds]
            if names and _overrides(self._stages[action.stage], names[0]):
                return self._call_method
        return function

    def _call_method(self, action: _Action, context: _PipelineContext) -> None:
        """Call the stage's method for an action with the arguments that torch passes."""
        owner: Value = context.schedule_ref
        stage, kind = self._stages[action.stage_index], action.computation_type
        k, every = action.microbatch_index, owner._n_microbatches
        if k is None:
            stage.perform_reduce_grad(every if owner.scale_grads else 1)
        elif kind is theirs.FORWARD:
            args, kwargs = self._arguments(stage, k)
            stage.forward_one_chunk(k, args, kwargs, save_forward_output=self._keeps_outputs)
        else:
            self._finished[stage.stage_index] += kind is not theirs.BACKWARD_INPUT
            last = kind is not theirs.BACKWARD_INPUT and self._finished[stage.stage_index] == every
            if kind is theirs.BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(k, last_backward=last)
                return
            whole, loss = kind is theirs.FULL_BACKWARD, owner._maybe_get_loss(stage, k)
            stage.backward_one_chunk(k, loss=loss, full_backward=whole, last_backward=last)

    def _arguments(self, stage: _PipelineStageBase, microbatch: int) -> tuple[Value, Value]:
        """The arguments of a forward in step()."""
        args, kwargs = self._context.arg_mbs or [], self._context.kwarg_mbs or []
        return args[microbatch] if stage.is_first else (), kwargs[microbatch]

    def _run_action(self, custom: ActionCall) -> None:
        """Run the action, and the weight-gradient runner of a stage with a `dw_builder`."""
        action = custom.action
        if isinstance(action, Action) and action.kind is Kind.F and action.stage in self._in_context:
            assert action.microbatch is not None, "a forward has one"
            self._forwards[action.stage] = action.microbatch
        custom.run()
        if isinstance(action, Overlap) or not action.kind.is_backward:
            return
        builder, key = self._stages[action.stage].dw_builder, action.work_unit
        if builder is not None and action.kind is not Kind.W:
            self._weight_runners[key] = builder()
        if builder is not None and action.kind is not Kind.I:
            self._weight_runners.pop(key)()

    def drive(self, kind: Kind, stage: int, microbatch: int | None) -> None:
        """Run this action, which a function was called for."""
        action = Action(kind, stage, microbatch)
        if action not in self._pending:
            expected = ", ".join(map(str, self._pending))
            raise PipelineError(f"a custom function runs {action}, but it replaces {expected}")
        self._driven.add(action)
        self._pending[action]()

    def drive_forward(self, stage: _PipelineStageBase, microbatch: int, args: Value, kwargs: Value) -> Value:
        """Run a forward with the arguments of the step; return the output of the module."""
        index, k = stage.stage_index, microbatch
        own_args, own_kwargs = self._arguments(stage, k)
        passed = [*(args if stage.is_first else ()), *(kwargs or {}).values()]
        if list(map(id, passed)) != list(map(id, [*own_args, *own_kwargs.values()])):
            raise PipelineError(f"the arguments of {index}F{k} differ from those of step(): change them there")
        outputs: list[Value] = []
        returned = self._traced is not None  # before our hooks change it
        with self._modules[index].register_forward_hook(
            lambda *seen: outputs.append(seen[-1]), prepend=returned
        ):
            self.drive(Kind.F, index, k)
        return outputs[-1]


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _list_to_tuple(_module: nn.Module, _args: object, output: Value) -> Value:
    """Treat a list as a tuple of the next stage's arguments, as torch does."""
    return tuple(output) if type(output) is list else output


def _merger(owner: _PipelineSchedule) -> Value:
    """How outputs are merged: by torch's spec, by an overridden method, or along dimension 0."""
    if owner._output_merge_spec is None and type(owner)._merge_outputs is _PipelineSchedule._merge_outputs:
        return 0
    reference = weakref.ref(owner)

    def merge(parts: Iterable[Value]) -> Value:
        alive: Value = reference()
        return alive._merge_outputs(list(parts))

    return SimpleNamespace(split=len, merge=merge)  # its split is never called


# --- traced pipes with values that skip stages -----------------------------------------------------
#
# A stage hands on the list of all its outputs, and a stage that it feeds takes those that it uses:
#
#     stage 0 returns (x, y)    stage 1 takes x, returns z    stage 2 takes z, y
#     graph  0 -> 1, 0 -> 2, 1 -> 2      stage 2 is called with [x, y], [z]


@dataclass(frozen=True)
class _TracedGraph:
    """The stage graph of a traced pipe, and what each stage takes of the outputs of others."""

    graph: StageGraph
    picks: tuple[Picks, ...]

    def hooks(self, index: int, module: nn.Module) -> list[RemovableHandle]:
        """Hooks that make a module take and return values as this graph needs it."""
        inputs, hooks = self.graph.inputs(index), []
        if inputs:
            places = [(inputs.index(source), position) for source, position in self.picks[index]]
            hooks.append(module.register_forward_pre_hook(partial(_pick, places)))
        if self.graph.outputs(index):
            hooks.append(module.register_forward_hook(_as_list))
        return hooks


def _pick(places: Sequence[tuple[int, int]], _module: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([values[place][position] for place, position in places])


def _as_list(_module: nn.Module, _args: object, output: object) -> list[Any]:
    return list(output) if isinstance(output, tuple | list) else [output]


def _traced_graph(stage: _PipelineStageBase) -> _TracedGraph | None:
    """The graph of a traced pipe; None if each stage takes all outputs of the previous one, in order."""
    if not isinstance(stage, _PipelineStage):
        return None
    nodes = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
    if all(_values(node) == _outputs(before) for before, node in pairwise(nodes)):
        return None
    picks = tuple(tuple(_origin(value, nodes) for value in _values(node)) for node in nodes)
    edges = {(source, target) for target, taken in enumerate(picks) for source, _ in taken}
    graph = StageGraph(len(nodes), tuple(edges))
    if graph.sources != (0,) or graph.sinks != (len(nodes) - 1,):
        odd = sorted({*graph.sources, *graph.sinks} - {0, len(nodes) - 1})
        raise PipelineError(
            f"stage {listed(odd)} of the traced pipe takes nothing from others or hands nothing on to them: "
            "only the first stage may take nothing, and only the last one hand nothing on"
        )
    return _TracedGraph(graph, picks)


def _values(node: Node) -> list[Node]:
    """The arguments of a stage that other stages compute."""
    return [value for value in node.args if isinstance(value, Node) and value.op != "placeholder"]


def _outputs(node: Node) -> list[Node]:
    """The outputs of a stage that are used, in order."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return sorted(parts, key=lambda part: int(str(part.args[1]))) or [node]


def _origin(value: Node, stages: Sequence[Node]) -> tuple[int, int]:
    """The stage that returns a value, and its position there."""
    if value.target is operator.getitem:
        source, position = value.args[:2]
        return stages.index(source), int(str(position))
    return stages.index(value), 0
