"""The parameters of one stage that `fully_shard` shards; the actions of the schedule gather and free them.

By itself, FSDP2 gathers the parameters of a module when its forward begins, frees them when it ends, and
reduces gradients after every backward. In a pipeline, actions decide instead:

    UNSHARD       starts the all-gather and does not wait; the first module that needs its parameters waits
    RESHARD       frees the gathered parameters
    REDUCE_GRAD   one reduce-scatter per FSDP parameter group, once per step

The end of the step does what the schedule leaves out. FSDP2 has no public API to disable reductions and start
them later, so this module reads and sets fields of its parameter groups, as torch 2.13 has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state

from penstock.errors import PipelineError
from penstock.runtime.data_parallel.checksums import ReplicatedParameter

_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def fsdp_shards_by_stage(modules: Mapping[int, nn.Module]) -> dict[int, FsdpShards]:
    """The shards that `fully_shard`, or the `replicate` built on it, made of these stages."""
    loaded = sys.modules.get(_FSDP_STATE)
    if loaded is None:  # nothing is sharded, and the import is slow
        return {}
    shards = {}
    for stage, module in modules.items():
        found = [_get_module_state(part) for part in module.modules()]
        states = dict.fromkeys(state for state in found if isinstance(state, loaded.FSDPState))
        if states:
            shards[stage] = FsdpShards(list(states), f"stage {stage}")
    return shards


class FsdpShards:
    """The FSDP parameter groups of one stage."""

    def __init__(self, states: list[Any], owner: str) -> None:
        try:
            for state in states:  # outermost first: it becomes the root of the others
                state._lazy_init()  # noqa: SLF001
        except RuntimeError as error:
            raise PipelineError(
                f"{owner}: FSDP does not support the way its modules are sharded ({error}): also call "
                "fully_shard on the whole stage module, after its children"
            ) from error
        self._roots = [state for state in states if state._is_root]  # noqa: SLF001
        self._groups: list[Any] = [group for state in states for group in state._fsdp_param_groups]  # noqa: SLF001
        self._idle = type(states[0]._training_state).IDLE  # noqa: SLF001
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
        target._sharded_param_data = source._sharded_param_data  # noqa: SLF001
        target._setattr_on_modules(kept)  # noqa: SLF001

    def data_groups(self) -> list[tuple[dist.ProcessGroup, ...]]:
        """For each parameter group: the process groups that reduce its gradients."""
        found = []
        for group in self._groups:
            names = ("shard_process_group", "replicate_process_group")
            groups = [getattr(group.mesh_info, name, None) for name in names]
            found.append(tuple([each for each in groups if each is not None]))
        return found

    def replicated(self) -> Iterator[ReplicatedParameter]:
        """The parameters whose shard other ranks hold as well (hybrid sharding)."""
        for group in self._groups:
            replicas = getattr(group.mesh_info, "replicate_process_group", None)
            if replicas is not None:
                for each in group.fsdp_params:
                    yield ReplicatedParameter(each._param_fqn, each.sharded_param, replicas)  # noqa: SLF001

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Only the methods below gather, reshard and reduce in here; FSDP itself does not."""
        self._gather_once()
        before = [(g.reduce_grads, g.reshard_after_backward, g.post_forward_mesh_info) for g in self._groups]
        last = [root._state_ctx.is_last_backward for root in self._roots]  # noqa: SLF001
        for group in self._groups:
            group.reduce_grads = group.reshard_after_backward = False
            group.post_forward_mesh_info = None
        for root in self._roots:
            root._state_ctx.is_last_backward = False  # noqa: SLF001
        try:
            yield
        finally:
            for group, (reduces, reshards, mesh) in zip(self._groups, before):
                group.reduce_grads, group.reshard_after_backward = reduces, reshards
                group.post_forward_mesh_info = mesh
            for root, was in zip(self._roots, last):
                root._state_ctx.is_last_backward = was  # noqa: SLF001

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
            group._training_state = self._idle  # noqa: SLF001

    def finish(self, *, reduces: bool) -> None:
        """The end of a step: reduce the remaining gradients, wait for all, and free all gathered parameters."""
        for group in self._groups:
            group.reduce_grads = reduces
        for root in self._roots:
            root._state_ctx.is_last_backward = True  # noqa: SLF001
            root._root_post_backward_final_callback()  # noqa: SLF001
            root._state_ctx.is_last_backward = False  # noqa: SLF001
        for group in self._groups:
            group.reduce_grads = False
        self.reshard()

    def drop(self) -> None:
        """After a failed step: discard the gathered parameters and the unreduced gradients."""
        for group in self._groups:
            group._all_gather_result = None  # noqa: SLF001 -- another rank may never send its part
        for each in self._parameters:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each.unsharded_param.grad = None
        for root in self._roots:
            root._reset_iter_state()  # noqa: SLF001
