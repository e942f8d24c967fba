"""torch's schedule classes: each builds one of our families, or takes an order from a subclass."""

# ruff: noqa: A002, FBT001, FBT002 -- torch's signatures
# mypy: disable-error-code="misc, override, no-untyped-call"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import Signature, signature
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as theirs

from penstock.arguments import listed, plural
from penstock.errors import PipelineError
from penstock.families import build
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import (
    DEFAULT_PASSES,
    AddCommunication,
    AddGradReduction,
    AddReduceWaits,
    AddSendWaits,
    AddSharding,
    DeferReceives,
    Pass,
    SendBudget,
    lower,
)
from penstock.lowering.sharding import Lookahead
from penstock.pipelining._liveness import PipelineActivationLiveness, analyze_pipeline_activation_liveness
from penstock.pipelining._orders import (  # noqa: F401 -- ours, under torch's names
    HAS_WAITS,
    ActionList,
    ActionLists,
    Format,
    InvalidOrderError,
    Order,
    _Action,
    _add_send_recv,
    _defer_recv_ops,
    _dump_chrometrace,
    _merge_bw,
    _simulate_comms_compute,
    _validate_schedule,
    checked_schedule,
    order_of,
    read_csv,
    with_waits,
)
from penstock.pipelining._runner import Runner
from penstock.pipelining._torch_names import names_of
from penstock.pipelining.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    check_same_arguments,
    check_types,
    refuse_whole_batch,
)
from penstock.pipelining.stage import _PipelineStageBase
from penstock.runtime.batch import Batcher, Value
from penstock.runtime.torch_internals.pipelining import microbatches_of, stages_of

__all__ = [
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_Action",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]

__getattr__ = names_of(theirs)

Microbatches: TypeAlias = list[Value] | None
LossKwargs: TypeAlias = dict[str, Value] | None

_DEFAULT_ACTIVE_STAGES = 3


class _PipelineSchedule(theirs._PipelineSchedule):
    """Constructors and input checks are torch's; steps run in a `Pipeline` created at the first step."""

    _computes_loss = True
    _built: Schedule | None = None
    _order: Order | None = None
    _runner: Runner | None = None
    _outputs: Value = None
    _finalize_gradients = True

    @property
    def _local_stages(self) -> list[_PipelineStageBase]:
        """The stages of this rank."""
        return vars(self).get("_stages") or [vars(self)["_stage"]]

    @property
    def pipeline_order(self) -> Value:
        """The compute actions of each rank in order; idle slots are not stored."""
        if self._order is None and self._built is not None:
            self._order = order_of(self._built)
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: Order | None) -> None:
        self._set_order(order)

    def _set_order(self, order: Order | None) -> None:
        self._order, self._built = order, None
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the pipeline after a change of order or functions; the next step creates another."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _schedule(self) -> Schedule:
        """The schedule to run: as built, or as assigned to `pipeline_order`."""
        if self._order is None and self._built is not None:
            return self._built
        if not self._order:
            raise PipelineError(f"{type(self).__name__} has no order: set pipeline_order before step()")
        return self._checked_schedule(self._order)

    def _checked_schedule(self, order: Order) -> Schedule:
        stages = self._local_stages[0].num_stages
        ranks = vars(self).get("pp_group_size", stages)
        return checked_schedule(order, ranks, stages, self._n_microbatches, type(self).__name__)

    def _connect(self) -> Runner:
        if self._runner is None:
            registered = vars(self).get("_comp_type_to_function_map", {})
            functions = {
                Kind(theirs._ComputationType(kind).value): function for kind, function in registered.items()
            }
            schedule = self._schedule()
            if self._has_backward and self._computes_loss and not schedule.table.has(Kind.B, Kind.I):
                raise InvalidOrderError(
                    f"{type(self).__name__} has loss_fn=, but its order has no backward, so step() would train "
                    "nothing: add backwards to the order, or call eval()"
                )
            self._runner = Runner(self, schedule, self._local_stages, functions)
        return self._runner

    def step(
        self,
        *args: Value,
        target: Value = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: LossKwargs = None,
        arg_mbs: Microbatches = None,
        kwarg_mbs: Microbatches = None,
        target_mbs: Microbatches = None,
        finalize_gradients: bool = True,
        **kwargs: Value,
    ) -> Value:
        """Train on a batch; return the merged outputs on the rank of the last stage.

        `arg_mbs`, `kwarg_mbs` and `target_mbs` are a batch that is already split, with an entry per microbatch.
        With `finalize_gradients=False` gradients are accumulated, and a later step reduces them.
        A subclass with its own `_step_microbatches` runs on torch's stages, unless it calls super().
        """
        with self._reporting_failures():
            needs_autograd = self._has_backward and vars(self).get("_backward_requires_autograd", True)
            if needs_autograd and not torch.is_grad_enabled():
                raise RuntimeError("step() computes gradients, but autograd is disabled; use eval()")
            if self._has_own_steps and not finalize_gradients:
                raise PipelineError(
                    f"finalize_gradients=False would be ignored: {type(self).__name__} has its own "
                    "_step_microbatches"
                )
            split = self._get_microbatch_inputs(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._finalize_gradients = finalize_gradients
        for stage in self._local_stages if self._has_own_steps else ():
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(*split, losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs)
        outputs, self._outputs = self._outputs, None
        last = [stage for stage in self._local_stages if stage.is_last and return_outputs]
        if outputs is None and self._has_own_steps and last and last[0].output_chunks:
            return self._merge_outputs(last[0].output_chunks)
        return outputs

    def eval(
        self,
        *args: Value,
        target: Value = None,
        losses: list[Tensor] | None = None,
        arg_mbs: Microbatches = None,
        kwarg_mbs: Microbatches = None,
        target_mbs: Microbatches = None,
        **kwargs: Value,
    ) -> Value:
        """Forward of a batch; an overridden `step` gets only what is given here."""
        split = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        kwargs.update((name, entries) for name, entries in split.items() if entries is not None)
        before, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = before

    @property
    def _has_own_steps(self) -> bool:
        """Whether a subclass runs steps itself, with torch's stages."""
        return type(self)._step_microbatches is not _PipelineSchedule._step_microbatches

    def _reporting_failures(self) -> AbstractContextManager[None]:
        if self._has_own_steps:
            return nullcontext()
        return self._connect().reporting_failures(training=self._has_backward)

    def _get_microbatch_inputs(
        self,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        target: Value,
        arg_mbs: Microbatches,
        kwarg_mbs: Microbatches,
        target_mbs: Microbatches,
    ) -> tuple[Microbatches, Microbatches, Microbatches]:
        """The microbatches of a call: split here, or given."""
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return *self._split_inputs(args, kwargs), None if target is None else self._split_target(target)
        refuse_whole_batch(args, kwargs, target)
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs)
        check_types(arg_mbs, kwarg_mbs)
        return arg_mbs, kwarg_mbs, target_mbs

    def _split_target(self, target: Value) -> list[Value]:
        """Split a tensor as torch does, other values as our batches; a list already is microbatches."""
        if isinstance(target, Tensor):
            return list(_split_tensor(target, TensorChunkSpec(0), self._n_microbatches))
        return Batcher(self._n_microbatches).split_target(target)

    def _step_microbatches(
        self,
        arg_mbs: Microbatches = None,
        kwarg_mbs: Microbatches = None,
        target_mbs: Microbatches = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: LossKwargs = None,
    ) -> None:
        """The same for a batch that is already split."""
        runner = self._connect()
        with runner.reporting_failures(training=self._has_backward):
            runner.check_unchanged(self)
            if not self._computes_loss and (target_mbs is not None or losses is not None):
                raise RuntimeError("a forward-only schedule computes no loss: remove target and losses")
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            check_same_arguments(arg_mbs, kwarg_mbs)
        context = theirs._PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        self._begin()
        with torch.set_grad_enabled(self._has_backward or torch.is_grad_enabled()):
            self._outputs = runner.run(
                context,
                loss_kwargs or {},
                training=self._has_backward,
                return_outputs=return_outputs,
                reduces=self._finalize_gradients,
            )
        self._internal_losses = [runner.losses[k] for k in sorted(runner.losses)]
        self._update_losses(self._local_stages, losses)

    def _begin(self) -> None:
        """Prepare a step."""

    def _maybe_compute_loss(
        self, stage: Value, output: Value, target_mbs: Value, mb_index: int, loss_kwargs: Value = None
    ) -> None:
        """Nothing to do in our steps: the forward of the last stage computes the loss."""
        if self._runner is None or not self._runner.is_running:
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)

    def _maybe_get_loss(self, stage: _PipelineStageBase, mb_index: int) -> Tensor | None:
        if self._runner is None or not self._runner.is_running:
            return super()._maybe_get_loss(stage, mb_index)  # type: ignore[no-any-return]
        return self._runner.losses.get(mb_index) if stage.is_last else None


class PipelineScheduleMulti(_PipelineSchedule, theirs.PipelineScheduleMulti):
    """Several stages per rank; a subclass sets `pipeline_order`."""

    def _map_stages(self, stage_index_to_group_rank: dict[int, int]) -> None:
        self.stage_index_to_group_rank = stage_index_to_group_rank
        for stage in self._stages:
            stage.stage_index_to_group_rank = stage_index_to_group_rank

    def _validate_and_set_stage_mapping(self, actions: Order) -> Schedule:
        """Validate the order, and take the stage mapping from it."""
        schedule = self._checked_schedule(actions)
        self._map_stages(dict(enumerate(schedule.placement.stage_to_rank)))
        return schedule

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Read the order from a CSV file, written by torch or by us."""
        if format != "compute_only":
            raise AssertionError(f'format must be "compute_only" (given {format!r})')
        self.pipeline_order = read_csv(filename)
        self._validate_and_set_stage_mapping(self.pipeline_order)


class _PipelineScheduleRuntime(PipelineScheduleMulti, theirs._PipelineScheduleRuntime):
    """With communication: lowered from an order, or assigned to `pipeline_order_with_comms`."""

    _lowered: Schedule | None = None
    _order_with_comms: Order | None = None
    # set by torch's constructor from 2.15 on
    _max_active_stages: int
    _unshard_lookahead: Lookahead
    _defer_reduce_grad_wait: bool
    _max_outstanding_sends: int | None

    if not TYPE_CHECKING:  # torch's constructor has no types, so callers see none here

        def __init__(self, *args: Value, **kwargs: Value) -> None:
            super().__init__(*args, **kwargs)
            if HAS_WAITS:
                self._sharding.lookahead_of_ranks(self.pp_group_size)
                if self._defer_reduce_grad_wait:
                    self._validate_deferred_gradient_reduction()

    @property
    def pipeline_order_with_comms(self) -> Value:
        """All actions of each rank, with communication."""
        if self._order_with_comms is None:
            self._order_with_comms = order_of(self._schedule())
        return self._order_with_comms

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: Order) -> None:
        self._order_with_comms, self._lowered = order, None
        self._disconnect()

    def _set_order(self, order: Order | None) -> None:
        self._lowered = self._order_with_comms = None
        super()._set_order(order)

    def _schedule(self) -> Schedule:
        if self._order_with_comms is not None:
            return self._checked_schedule(self._order_with_comms)
        if self._lowered is None:
            self._lowered = self._lower(super()._schedule())
        return self._lowered

    def _lower(self, schedule: Schedule) -> Schedule:
        return lower(schedule, self._passes)

    @property
    def _passes(self) -> tuple[Pass, ...]:
        """The passes that give the lists of the installed torch, with the options of the constructor."""
        deferred = (DeferReceives(past_sends=True),) if self._defer_pp_recv else ()
        if not HAS_WAITS:
            return (*DEFAULT_PASSES, *deferred)
        return (
            *(self._sharding, AddGradReduction(), AddReduceWaits(deferred=self._defer_reduce_grad_wait)),
            *(AddCommunication(), AddSendWaits(), *deferred, *self._send_budget),
        )

    @property
    def _send_budget(self) -> tuple[Pass, ...]:
        limit = self._max_outstanding_sends if HAS_WAITS else None
        return () if limit is None else (SendBudget(messages=limit),)

    @property
    def _sharding(self) -> AddSharding:
        return AddSharding(self._max_active_stages, self._unshard_lookahead, oldest_first=True)

    def _refuse_options(self) -> None:
        """Raise if an option of torch 2.15 would be ignored for a list that already has communication."""
        if not HAS_WAITS:
            return
        lookahead = self._sharding.lookahead_of_ranks(self.pp_group_size)
        used = {
            "max_active_stages": self._max_active_stages != _DEFAULT_ACTIVE_STAGES,
            "unshard_lookahead": min(lookahead) < self._max_active_stages,
            "defer_reduce_grad_wait": self._defer_reduce_grad_wait,
        }
        if changed := [name for name, is_used in used.items() if is_used]:
            raise PipelineError(
                f"{listed(changed)} would be ignored: the list already has communication; give an order of "
                "compute actions, or leave the option out"
            )

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Lower an order, or take one that has communication."""
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"format is 'compute_only' or 'compute_comms' (given {format!r})")
        schedule = self._validate_and_set_stage_mapping(actions)
        if format == "compute_only" and schedule.level != "compute":
            raise ValueError("the order has other than compute actions: give format='compute_comms'")
        if format == "compute_comms" and any(action is None for row in actions.values() for action in row):
            raise InvalidOrderError("an order with communication has no idle slots (None)")
        if format == "compute_comms":
            self._refuse_options()
        is_compute = format == "compute_only"
        self._lowered = self._lower(schedule) if is_compute else lower(with_waits(schedule), self._send_budget)
        self._order_with_comms = None
        self._disconnect()

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Read the order from a CSV file, with or without communication, written by torch or by us."""
        order = read_csv(filename)
        if format == "compute_only":
            self.pipeline_order = order
        self._prepare_schedule_with_comms(order, format)

    def _simulate(self) -> ActionLists:
        """Return the actions by time slot if every action takes one."""
        mapping = self.stage_index_to_group_rank
        order = self.pipeline_order_with_comms
        return _simulate_comms_compute(order, mapping.__getitem__, self._num_stages)

    def register_custom_function(
        self, computation_type: theirs._ComputationType, custom_function: theirs._CustomFunctionProtocol
    ) -> None:
        """Call a function in place of the actions of a kind, also inside overlapped pairs."""
        super().register_custom_function(computation_type, custom_function)
        self._disconnect()

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """Nothing to do: validation ensures that a stage is unsharded where it computes."""

    def _begin(self) -> None:
        self.backward_counter.clear()
        for ops in (self.fwd_recv_ops, self.bwd_recv_ops):
            keys = ((stage.stage_index, k) for stage in self._stages for k in range(self._n_microbatches))
            ops.update((key, []) for key in keys)


class PipelineScheduleSingle(_PipelineSchedule, theirs.PipelineScheduleSingle):
    """One stage per rank; a subclass returns its order from `_get_pipeline_order`."""

    _family: ClassVar[str | None] = None

    def _get_pipeline_order(self) -> ActionLists | None:
        if self._family is None:
            return None
        return order_of(build(self._family, ranks=self._num_stages, microbatches=self._n_microbatches))


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only."""

    _family = "forward-only"
    _computes_loss = False


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    _family = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward, alternating; any number of microbatches."""

    _family = "1f1b"


class _FamilySchedule(_PipelineScheduleRuntime):
    """One of our families under torch's name."""

    _family: ClassVar[str]
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        if hasattr(theirs, cls.__name__):
            cls.__signature__ = signature(getattr(theirs, cls.__name__))

    def __init__(self, *args: Value, **kwargs: Value) -> None:
        bound = self.__signature__.bind(*args, **kwargs).arguments
        super().__init__(**bound)
        ranks, per_rank = self.pp_group_size, len(bound["stages"])
        self.n_local_stages, self.num_stages = per_rank, self._num_stages
        built = build(self._family, ranks=ranks, microbatches=bound["n_microbatches"], stages_per_rank=per_rank)
        if built.num_stages != self._num_stages:
            given = f"{plural(ranks, 'rank')} of {plural(per_rank, 'stage')}"
            raise PipelineError(f"{given} have {plural(built.num_stages, 'stage')}, not {self._num_stages}")
        self._order, self._built = None, built.renamed(type(self).__name__)
        self._map_stages(dict(enumerate(built.placement.stage_to_rank)))
        if (
            type(self)._calculate_single_rank_operations
            is not _FamilySchedule._calculate_single_rank_operations
        ):
            self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(ranks)}
            self._prepare_schedule_with_comms(self.pipeline_order)
        elif self._send_budget:
            self._schedule()  # raises here, as torch does, if the budget cannot be met

    def _calculate_single_rank_operations(self, rank: int) -> ActionList:
        """One rank's actions; a subclass may override it."""
        assert self._built is not None
        return order_of(self._built)[rank]


class ScheduleLoopedBFS(_FamilySchedule):
    """Breadth first: every microbatch through one local stage before the next."""

    _family = "looped-bfs"


class ScheduleInterleaved1F1B(_FamilySchedule):
    """1F1B over several stages per rank; any number of microbatches."""

    _family = "interleaved-1f1b"


class ScheduleInterleavedZeroBubble(_FamilySchedule):
    """Interleaved 1F1B with split backward."""

    _family = "interleaved-zero-bubble"

    def _add_bubbles_to_actions(self, num_stages_global: int) -> ActionLists:
        """The order with None where a rank waits."""
        mapping, order = self.stage_index_to_group_rank, self.pipeline_order or {}
        return _simulate_comms_compute(order, mapping.__getitem__, num_stages_global)


class ScheduleZBVZeroBubble(_FamilySchedule):
    """Zero bubble with V placement, two stages per rank."""

    _family = "zbv"


class ScheduleDualPipeV(_FamilySchedule):
    """Overlapped forwards and backwards with V placement, two stages per rank; any number of microbatches."""

    _family = "dualpipev"


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """Return the class of this name, case-insensitive."""
    classes = {name.removeprefix("Schedule"): globals()[name] for name in __all__ if name[0] in "PS"}
    for name, found in classes.items():
        if name.lower() == schedule_name.lower():
            return found  # type: ignore[no-any-return]
    raise ValueError(f"unknown schedule {schedule_name!r}; known: {', '.join(classes)}")


def schedule_over(built: Value, name: str, csv: str = "") -> _PipelineSchedule:
    """Return the schedule of this name, or of a CSV file, with the stages and the loss of one of torch's."""
    kind: Value = _PipelineScheduleRuntime if csv else get_schedule_class(name)
    stages = stages_of(built)
    several = issubclass(kind, PipelineScheduleMulti)
    schedule: Value = kind(
        stages if several else stages[0],
        microbatches_of(built),
        loss_fn=built._loss_fn,
        scale_grads=built.scale_grads,
    )
    if csv:
        schedule._load_csv(csv)
    return schedule  # type: ignore[no-any-return]


def names_of_modules(model: torch.nn.Module) -> list[str]:
    """Return the names of what torchtitan can place: children, and in place of containers their entries."""
    found = []
    for name, module in model.named_children():
        if isinstance(module, torch.nn.ModuleDict | torch.nn.ModuleList):
            found += [f"{name}.{entry}" for entry, _ in module.named_children()]
        else:
            found.append(name)
    return found


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Nothing to check: compiled stages compute their weight gradients in I."""
