"""torch's own runtime, observed: labels for its profiler, and states of its schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.families import build
from penstock.ir.action import parse_action
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.runtime.states.writer import (
    STATE_DIR,
    flush_states,
    register_states,
    request_states,
    state_folder,
)
from penstock.runtime.torch_internals.pipelining import (
    RUNTIME_CLASS,
    is_eval,
    microbatches_of,
    stage_count,
    stages_of,
    wrap_steps,
)
from penstock.runtime.transport.transport_errors import is_transport_error
from penstock.traces.diagnose.flight_recorder import messages_at_use
from penstock.traces.diagnose.rank_state import RankState, Wait, WaitKind

# Labels of actions for torch's profiler, on stages of torch whose schedule records none (1F1B).


def label_actions(*stages: Any) -> None:
    """Record every forward and backward of these `PipelineStage`s as a range such as `PP:0F3`.

    Torch's multi-stage schedules record them already; `Schedule1F1B` does not, and without ranges a trace has
    no times of a GPU per action. Call it once, before the steps that are profiled.
    """
    for stage in stages:
        stage.forward_one_chunk = _labelled(stage, "forward_one_chunk", "F")
        stage.backward_one_chunk = _labelled(stage, "backward_one_chunk", "B")


def _labelled(stage: Any, method: str, kind: str) -> Callable[..., Any]:
    run = getattr(stage, method)

    @wraps(run)
    def labelled(chunk: int, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"PP:{stage.stage_index}{kind}{chunk}"):
            return run(chunk, *args, **kwargs)

    return labelled


# States of torch's own runtime: `record_state(schedule)` follows a schedule of torch.distributed.pipelining.
#
# Its classes for several stages per rank run a list of actions; the recorder counts as the list is read. GPipe
# and 1F1B have no list: there the calls of the stage's methods are compared with the order that they follow.
# The methods also show the tensors of each message, and whether the rank computes or waits.


_MESSAGES = {
    "get_fwd_recv_ops": Kind.RECV_F,
    "get_fwd_send_ops": Kind.SEND_F,
    "get_bwd_recv_ops": Kind.RECV_B,
    "get_bwd_send_ops": Kind.SEND_B,
}
_ORDERS = {RUNTIME_CLASS: "", "Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}
"""The family of a class without a list, by its name: torch's module takes seconds to import."""
_COMPUTE = {"forward_one_chunk": Kind.F, "backward_one_chunk": Kind.B, "backward_weight_one_chunk": Kind.W}


def record_state(schedule: Any, state_dir: str | PathLike[str] | None = None) -> None:
    """Write the state of this rank, for `penstock diagnose`, if a step of this torch schedule fails or stalls.

    It is also written on SIGUSR1. Without `state_dir` the folder is that of PENSTOCK_STATE_DIR; if neither is
    given, nothing happens. Call it once for each schedule object, on every rank, before the first step.
    """
    folder = state_folder(state_dir)
    if type(schedule).__module__.startswith("penstock."):
        raise PipelineError(
            f"{type(schedule).__name__} runs on Penstock's runtime, which writes states itself: set {STATE_DIR}"
        )
    if _family_of(schedule) is None:
        raise PipelineError(
            f"record_state() knows torch's 1F1B, GPipe and the schedules for several stages per rank, not "
            f"{type(schedule).__name__}"
        )
    if folder is not None:
        recorder = _Recorder(schedule)
        schedule.penstock_recorder = recorder
        register_states(recorder, folder)


def _family_of(schedule: Any) -> str | None:
    """The family of a schedule object without a list, empty for one with a list; None for other objects."""
    names = [each.__name__ for each in type(schedule).__mro__ if "pipelining" in each.__module__]
    return next((_ORDERS[name] for name in names if name in _ORDERS), None)


class _TrackedList(list[Any]):
    """The list of a rank; tells the recorder which action is read, the first time that it is read in a step."""

    def __init__(self, actions: list[Any], recorder: _Recorder) -> None:
        super().__init__(actions)
        self._recorder = recorder
        self.is_read = False

    def __iter__(self) -> Iterator[Any]:
        if self.is_read:  # torch prints the list after an error
            yield from super().__iter__()
            return
        self.is_read = True
        for position, action in enumerate(super().__iter__()):
            self._recorder.reach(position)
            yield action
        self._recorder.reach(len(self))


class _Recorder:
    """Follows one schedule object; other threads read its fields."""

    def __init__(self, schedule: Any) -> None:
        stages = stages_of(schedule)
        self._has_list = not _family_of(schedule)
        group = stages[0].group
        members = tuple(dist.get_process_group_ranks(group))
        self._state = RankState(
            members,
            dist.get_rank(),
            self._order(schedule),
            mode="outside",
            runtime="torch.distributed.pipelining",
        )
        self._positions = {text: number for number, text in enumerate(self._state.steps)}
        self._current = ""
        """The call of a stage's method that runs now, as an action."""
        self._done: set[str] = set()
        """The computations of the current action that have ended."""
        self._messages: dict[str, tuple[str, ...]] = {}
        wrap_steps(schedule, self._run)
        for stage in stages:
            for name, kind in (_MESSAGES | _COMPUTE).items():
                method = getattr(stage, name)
                setattr(stage, name, functools.partial(self._call, method, kind, stage.stage_index))

    # --- the state, for other threads --------------------------------------------------------------

    def rank_state(self) -> RankState:
        """What this rank does."""
        state = self._state
        messages = dict(list(self._messages.items()))
        if not state.runs:
            return replace(state, messages=messages)
        finished = state.position >= len(state.steps)
        last = Wait(WaitKind.SEND, "its last sends to be received") if finished else None
        return replace(state, awaits=self._awaited(state), waiting_for=last, messages=messages)

    def _awaited(self, state: RankState) -> str:
        """The receive that the current action needs, if its computation has not begun."""
        if self._current or not state.action:
            return ""
        if not self._has_list:
            return state.action if "RECV" in state.action else ""
        for part in parse_action(state.action).parts:
            if str(part) not in self._done:
                kind = {Kind.F: "RECV_F", Kind.B: "RECV_B", Kind.I: "RECV_B"}.get(part.kind, "")
                receive = f"{part.stage}{kind}{part.microbatch}"
                return receive if receive in self._positions else ""
        return ""

    def ask_others(self) -> None:
        """Ask nobody: torch's ranks have no connection for it."""

    # --- the run -----------------------------------------------------------------------------------

    def reach(self, position: int) -> None:
        """The rank is at this step of its list."""
        if self._state.runs:
            self._done.clear()
            self._state = replace(self._state, position=position)

    def _run(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """One step of torch's runtime, or one eval: a step whose backward is switched off."""
        self._track(schedule)
        self._messages.clear()
        mode = "eval" if is_eval(schedule) else "step"
        step, call = self._state.step_number + (mode == "step"), self._state.call_number + 1
        self._state = replace(self._state, mode=mode, step_number=step, call_number=call, position=-1)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            failed = replace(self.rank_state(), error=text, is_origin=not is_transport_error(error))
            request_states("failure", failed, self)
            flush_states()
            raise
        finally:
            self._current = ""
            self._state = replace(self._state, mode="outside")

    def _track(self, schedule: Any) -> None:
        """Follow the list that the step will run, which may have been loaded since the last one."""
        if not self._has_list:
            return
        lists = schedule.pipeline_order_with_comms
        if not isinstance(lists[schedule.rank], _TrackedList):
            self._state = replace(self._state, schedule=self._order(schedule))
            self._positions = {text: number for number, text in enumerate(self._state.steps)}
            lists[schedule.rank] = _TrackedList(lists[schedule.rank], self)
        lists[schedule.rank].is_read = False

    def _call(
        self, method: Callable[..., Any], kind: Kind, stage: int, microbatch: int, *args: Any, **kwargs: Any
    ) -> Any:
        """One call of a stage's method."""
        whole = kwargs.get("full_backward", True)
        action = f"{stage}{(kind if whole else Kind.I).value}{microbatch}"
        if not self._has_list and action in self._positions:
            self.reach(self._positions[action])
        self._current = "" if kind.is_communication else action
        try:
            result = method(microbatch, *args, **kwargs)
        finally:
            self._current = ""
            self._done.add(action)
        if kind.is_communication:
            tensors = [each.tensor for each in result]
            self._messages[action] = tuple(f"{str(each.dtype)[6:]} {list(each.shape)}" for each in tensors)
        return result

    @staticmethod
    def _order(schedule: Any) -> Schedule:
        """The order that this object runs, on all ranks."""
        family = _family_of(schedule)
        if not family:
            rows = schedule.pipeline_order_with_comms
            hosts = schedule.stage_index_to_group_rank
            placement = Placement(tuple(hosts[stage] for stage in range(len(hosts))))
            texts = [[str(action) for action in list.__iter__(rows[rank])] for rank in sorted(rows)]
            return Schedule(texts, placement, microbatches_of(schedule), type(schedule).__name__)
        built = build(family, ranks=stage_count(schedule), microbatches=microbatches_of(schedule))
        return messages_at_use(built).renamed(type(schedule).__name__)
