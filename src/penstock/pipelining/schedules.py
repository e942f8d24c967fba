"""torch's schedule classes: each builds one of our families, or takes an order from a subclass."""


# mypy: disable-error-code="misc, no-untyped-call"

from __future__ import annotations

from inspect import Signature, signature
from typing import ClassVar

from torch.distributed.pipelining import schedules as theirs

from penstock.arguments import plural
from penstock.errors import PipelineError
from penstock.families import build
from penstock.pipelining import _orders
from penstock.pipelining._classes import PipelineScheduleMulti, _PipelineSchedule, _PipelineScheduleRuntime
from penstock.pipelining._orders import ActionList, ActionLists, _Action, order_of
from penstock.pipelining._torch_names import names_of
from penstock.pipelining.stage import _PipelineStageBase
from penstock.runtime.batch import Value
from penstock.runtime.torch_internals.pipelining import microbatches_of, stages_of

__all__ = [
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
    "get_schedule_class",
]

_ComputationType = theirs._ComputationType
_PipelineContext, _CustomFunctionProtocol = theirs._PipelineContext, theirs._CustomFunctionProtocol
F = FORWARD = _ComputationType.FORWARD
I = BACKWARD_INPUT = _ComputationType.BACKWARD_INPUT
W = BACKWARD_WEIGHT = _ComputationType.BACKWARD_WEIGHT
B = FULL_BACKWARD = _ComputationType.FULL_BACKWARD
OVERLAP_F_B, REDUCE_GRAD = _ComputationType.OVERLAP_F_B, _ComputationType.REDUCE_GRAD
UNSHARD, RESHARD = _ComputationType.UNSHARD, _ComputationType.RESHARD
SEND_F, RECV_F = _ComputationType.SEND_F, _ComputationType.RECV_F
SEND_B, RECV_B = _ComputationType.SEND_B, _ComputationType.RECV_B
_batch_p2p, _sorted_batch_p2p = theirs._batch_p2p, theirs._sorted_batch_p2p
_wait_batch_p2p, _requires_reduce_grad = theirs._wait_batch_p2p, theirs._requires_reduce_grad
_get_profiler_function_name, _get_1f1b_rank_ops = theirs._get_profiler_function_name, theirs._get_1f1b_rank_ops
_format_pipeline_order, _validate_schedule = theirs._format_pipeline_order, _orders._validate_schedule
_add_unshard_reshard, _add_reduce_grad = _orders._add_unshard_reshard, _orders._add_reduce_grad
_add_send_recv, _defer_recv_ops, _merge_bw = _orders._add_send_recv, _orders._defer_recv_ops, _orders._merge_bw
_simulate_comms_compute, _dump_chrometrace = _orders._simulate_comms_compute, _orders._dump_chrometrace
_get_warmup_ops = theirs._get_warmup_ops
__getattr__ = names_of(theirs)


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
        return _orders._simulate_comms_compute(order, mapping.__getitem__, num_stages_global)


class ScheduleZBVZeroBubble(_FamilySchedule):
    """Zero bubble with V placement, two stages per rank."""

    _family = "zbv"


class ScheduleDualPipeV(_FamilySchedule):
    """Overlapped forwards and backwards with V placement, two stages per rank; any number of microbatches."""

    _family = "dualpipev"


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of this name, case-insensitive."""
    classes = {name.removeprefix("Schedule"): globals()[name] for name in __all__ if name[0] in "PS"}
    for name, found in classes.items():
        if name.lower() == schedule_name.lower():
            return found  # type: ignore[no-any-return]
    raise ValueError(f"unknown schedule {schedule_name!r}; known: {', '.join(classes)}")


def schedule_over(built: Value, name: str, csv: str = "", **options: Value) -> _PipelineSchedule:
    """Return the schedule of this name, or of a CSV file, over the stages of one of torch's schedules."""
    kind: Value = _PipelineScheduleRuntime if csv else get_schedule_class(name)
    stages = stages_of(built)
    several = issubclass(kind, PipelineScheduleMulti)
    schedule: Value = kind(stages if several else stages[0], microbatches_of(built), **options)
    if csv:
        schedule._load_csv(csv)
    return schedule  # type: ignore[no-any-return]


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Nothing to check: compiled stages compute their weight gradients in I."""
