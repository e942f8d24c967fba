"""Data-parallel wrappers in a stage: `fully_shard`, `replicate` and DistributedDataParallel.

By itself, FSDP2 gathers the parameters of a module when its forward begins, frees them when it ends, and
reduces gradients after every backward. In a pipeline, actions decide instead:

    UNSHARD       starts the all-gather and does not wait; the first module that needs its parameters waits
    RESHARD       frees the gathered parameters
    REDUCE_GRAD   one reduce-scatter per FSDP parameter group, once per step

The end of the step does what the schedule leaves out. FSDP2 has no public API to read which reductions are
disabled, so `FsdpShards` reads and sets fields of its parameter groups. A backward ends by a private callback
until torch 2.14, and by `FSDPModule.finalize_backward` from 2.15 on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PipelineError
from penstock.runtime.torch_internals.modules import attributes_set
from penstock.runtime.torch_internals.registry import RELEASE, Feature, members

SHARDING = Feature(
    "stages in fully_shard, or in a replicate built on it",
    without="DistributedDataParallel, or replicas= of a Pipeline",
)
WRAPPING = Feature(
    "stages in DistributedDataParallel or replicate", without="fully_shard, or replicas= of a Pipeline"
)

_FSDP = "torch.distributed.fsdp._fully_shard"
_FSDP_STATE = f"{_FSDP}._fsdp_state"
_module_state = SHARDING.name("torch.distributed._composable_state._get_module_state")
_REPLICATE = "torch.distributed._composable.replicate"
_PARAMETER = f"{_FSDP}._fsdp_param.FSDPParam"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_HAS_FINALIZATION = RELEASE >= (2, 15)
_NAMES_BY_VERSION = (
    [f"{_FSDP_STATE}.FSDPStateContext.manual_backward_finalization", f"{_GROUP}._set_unsharded_grad_dtypes"]
    if _HAS_FINALIZATION
    else [
        f"{_FSDP_STATE}.FSDPState._root_post_backward_final_callback",
        f"{_FSDP_STATE}.FSDPStateContext.is_last_backward",
        *members(
            _PARAMETER,
            "accumulate_unsharded_grad_if_needed to_accumulated_grad_if_needed unsharded_accumulated_grad",
        ),
    ]
)


def fsdp_shards_by_stage(modules: Mapping[int, nn.Module]) -> dict[int, FsdpShards]:
    """Return the shards that `fully_shard`, or the `replicate` built on it, made of these stages."""
    loaded = sys.modules.get(_FSDP_STATE)
    # the import is slow, and nothing is sharded without it
    return {} if loaded is None else _shards_by_stage(modules, loaded.FSDPState)


@SHARDING.uses(
    *members(
        f"{_FSDP_STATE}.FSDPState",
        "_fsdp_param_groups _is_root _lazy_init _reset_iter_state _state_ctx _training_state",
    ),
    *members(
        _PARAMETER,
        "_param_fqn _setattr_on_modules _sharded_param_data _unsharded_param reduce_dtype sharded_param",
    ),
    *members(
        _GROUP,
        "_all_gather_result _post_reduce_event _training_state device_handle fsdp_params mesh_info"
        " post_backward post_forward_mesh_info reduce_grads reshard reshard_after_backward unshard"
        " wait_for_unshard",
    ),
    *_NAMES_BY_VERSION,
)
def _shards_by_stage(modules: Mapping[int, nn.Module], state_class: type) -> dict[int, FsdpShards]:
    shards = {}
    for stage, module in modules.items():
        found = [_module_state(part) for part in module.modules()]
        states = dict.fromkeys(state for state in found if isinstance(state, state_class))
        if states:
            shards[stage] = _SHARDS(list(states), f"stage {stage}")
    return shards


class FsdpShards:
    """The FSDP parameter groups of one stage."""

    def __init__(self, states: list[Any], owner: str) -> None:
        try:
            for state in states:  # outermost first: it becomes the root of the others
                state._lazy_init()
        except RuntimeError as error:
            raise PipelineError(
                f"{owner}: FSDP does not support the way its modules are sharded ({error}): also call "
                "fully_shard on the whole stage module, after its children"
            ) from error
        self._roots = [state for state in states if state._is_root]
        self._groups: list[Any] = [group for state in states for group in state._fsdp_param_groups]
        self._idle = type(states[0]._training_state).IDLE
        self._with_reduce_dtype = [each for each in self._parameters if each.reduce_dtype is not None]
        self._gathered_once = not self._with_reduce_dtype
        self.reshard()

    @property
    def _parameters(self) -> list[Any]:
        return [each for group in self._groups for each in group.fsdp_params]

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The sharded parameters that an optimizer sees."""
        return {each.sharded_param for each in self._parameters}

    def tie(self, parameter: nn.Parameter, other: FsdpShards, kept: nn.Parameter) -> None:
        """Replace `parameter` of this stage by the parameter `kept` of another stage."""
        (source,) = (each for each in other._parameters if each.sharded_param is kept)
        (target,) = (each for each in self._parameters if each.sharded_param is parameter)
        target.sharded_param = source.sharded_param
        target._sharded_param_data = source._sharded_param_data
        target._setattr_on_modules(kept)

    def data_groups(self) -> list[tuple[dist.ProcessGroup, ...]]:
        """Return, for each parameter group, the process groups that reduce its gradients."""
        names = ("shard_process_group", "replicate_process_group")
        found = ([getattr(group.mesh_info, name, None) for name in names] for group in self._groups)
        return [tuple([each for each in groups if each is not None]) for groups in found]

    def replicated(self) -> Iterator[tuple[str, nn.Parameter, dist.ProcessGroup]]:
        """Yield the parameters whose shard other ranks hold as well (hybrid sharding): name, shard, group."""
        for group in self._groups:
            replicas = getattr(group.mesh_info, "replicate_process_group", None)
            if replicas is not None:
                for each in group.fsdp_params:
                    yield each._param_fqn, each.sharded_param, replicas

    @property
    def _ends_by_itself(self) -> list[tuple[Any, str, bool]]:
        """The switch of each root for the end of a backward, as object, name and the value that disables it."""
        return [(root._state_ctx, "is_last_backward", False) for root in self._roots]

    def scheduled(self) -> AbstractContextManager[None]:
        """Let only the methods below gather, reshard and reduce; FSDP itself does not."""
        self._gather_once()
        off = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}
        values = [(group, name, value) for group in self._groups for name, value in off.items()]
        return attributes_set([*values, *self._ends_by_itself])

    def _gather_once(self) -> None:
        """Gather and free all parameters once, if gradients are reduced in another dtype.

        torch then accesses the unsharded parameters even of a module that never runs.
        """
        if self._gathered_once:
            return
        for group in self._groups:
            if not all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                group.unshard()
                group.wait_for_unshard()
                group.reshard()
        self._gathered_once = True

    def unshard(self) -> None:
        """UNSHARD: start the all-gather of the parameters."""
        for group in self._groups:
            group.unshard(async_op=True)

    def reshard(self) -> None:
        """RESHARD: free the gathered parameters."""
        for group in self._groups:
            group.wait_for_unshard()  # for a module that did not run: its parameters are stale in the next step
            group.reshard()

    def accumulate_gradients(self) -> None:
        """After W: accumulate the new gradients in the reduce dtype, where there is one."""
        for each in self._with_reduce_dtype:
            if hasattr(each, "_unsharded_param"):
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """REDUCE_GRAD: start the reduction of the gradients; on an accelerator it overlaps with computation."""
        for group in reversed(self._groups):
            group.reduce_grads = True
            group.post_backward()
            group.reduce_grads = False
            group._training_state = self._idle

    def wait(self) -> None:
        """WAIT_REDUCE_GRAD: the device's current stream waits for the reduction."""
        for group in self._groups:
            if group._post_reduce_event is not None:
                group.device_handle.current_stream().wait_event(group._post_reduce_event)

    def finish(self, *, reduces: bool) -> None:
        """The end of a step: reduce the remaining gradients, wait for all, and free all gathered parameters."""
        for group in self._groups:
            group.reduce_grads = reduces
        for root in self._roots:
            self._end_backward(root)
        for group in self._groups:
            group.reduce_grads = False
        self.reshard()

    def _end_backward(self, root: Any) -> None:
        root._state_ctx.is_last_backward = True
        root._root_post_backward_final_callback()
        root._state_ctx.is_last_backward = False

    def drop(self) -> None:
        """After a failed step: discard the gathered parameters and the unreduced gradients."""
        for group in self._groups:
            group._all_gather_result = None  # another rank may never send its part
        for each in self._parameters:
            if hasattr(each, "_unsharded_param"):
                each.unsharded_param.grad = None
            self._drop_accumulated(each)
        for root in self._roots:
            root._reset_iter_state()

    def _drop_accumulated(self, parameter: Any) -> None:
        parameter.unsharded_accumulated_grad = None


class _FinalizedShards(FsdpShards):
    """The same from torch 2.15 on: unsharded gradients have the reduce dtype, and `finish` ends a backward."""

    @property
    def _ends_by_itself(self) -> list[tuple[Any, str, bool]]:
        return [(root._state_ctx, "manual_backward_finalization", True) for root in self._roots]

    def accumulate_gradients(self) -> None:
        for group in self._groups:
            group._set_unsharded_grad_dtypes(defer_upcast=False)

    def _end_backward(self, root: Any) -> None:
        root.finalize_backward()

    def _drop_accumulated(self, parameter: Any) -> None:
        """Nothing: the gradients of unsharded parameters are all there is."""


_SHARDS = _FinalizedShards if _HAS_FINALIZATION else FsdpShards


def wrapper_of(part: nn.Module) -> tuple[nn.Module, list[tuple[Any, str, bool]]]:
    """Return the DistributedDataParallel wrapper that `replicate` made for a module, or else the module itself.

    The second value has objects and attributes that control reductions, and the value that disables them.
    """
    composable = sys.modules.get(_REPLICATE)
    if composable is None or not isinstance(part, composable.DDP):
        return part, []
    return _composable_wrapper(composable.replicate.state(part))


@WRAPPING.uses(*members(f"{_REPLICATE}._ReplicateState", "_ddp _init_args _no_sync lazy_init"))
def _composable_wrapper(state: Any) -> tuple[nn.Module, list[tuple[Any, str, bool]]]:
    if state._init_args:  # torch creates the wrapper in the first forward
        state.lazy_init()
    return state._ddp, [(state, "_no_sync", True)]  # which sets the wrapper's switch at every forward


@WRAPPING.uses("torch.nn.parallel.DistributedDataParallel._comm_hooks")
def has_communication_hooks(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper has communication hooks."""
    return bool(wrapper._comm_hooks)
