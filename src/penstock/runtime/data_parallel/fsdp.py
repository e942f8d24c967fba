"""The parameters of one stage that `fully_shard` shares out, gathered and let go of when the schedule says so.

Left alone, FSDP2 gathers a module's parameters when its forward begins, lets go of them when it ends, and
reduces gradients after every backward. In a pipeline the actions decide instead:

    UNSHARD       starts to gather, and does not wait: the first module that needs its parameters does
    RESHARD       lets go of them
    REDUCE_GRAD   one reduce-scatter for each of FSDP's parameter groups, once in a step

Whatever the schedule leaves out is done at the end of the step. FSDP2 has no public way to hold reductions back
and start them later, so this reads and sets fields of its parameter groups, as torch 2.13 has them.
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

__all__ = ["Shards", "shards_by_stage"]

_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def shards_by_stage(modules: Mapping[int, nn.Module]) -> dict[int, Shards]:
    """What `fully_shard`, or a `replicate` that is built on it, made of these stages."""
    loaded = sys.modules.get(_FSDP_STATE)
    if loaded is None:  # then nothing can have been sharded, and loading it takes long
        return {}
    shards = {}
    for stage, module in modules.items():
        found = [_get_module_state(part) for part in module.modules()]
        states = dict.fromkeys(state for state in found if isinstance(state, loaded.FSDPState))
        if states:
            shards[stage] = Shards(list(states), f"stage {stage}")
    return shards


class Shards:
    """FSDP's parameter groups of one stage."""

    def __init__(self, states: list[Any], what: str) -> None:
        try:
            for state in states:  # the outermost first: it becomes the root of those below
                state._lazy_init()  # noqa: SLF001
        except RuntimeError as error:
            raise PipelineError(
                f"{what}: FSDP cannot use its modules as they are sharded ({error}): call fully_shard on the "
                "stage's own module as well, after its parts"
            ) from error
        self._roots = [state for state in states if state._is_root]  # noqa: SLF001
        self._groups: list[Any] = [group for state in states for group in state._fsdp_param_groups]  # noqa: SLF001
        self._idle = type(states[0]._training_state).IDLE  # noqa: SLF001
        self._cast = [each for each in self._parameters if each.reduce_dtype is not None]
        self._gathered_once = not self._cast
        self.reshard()

    @property
    def _parameters(self) -> list[Any]:
        return [each for group in self._groups for each in group.fsdp_params]

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The sharded parameters, as an optimizer sees them."""
        return {each.sharded_param for each in self._parameters}

    def hold(self, kept: nn.Parameter, mine: Shards, other: nn.Parameter) -> None:
        """Let the parameter `other` of this stage be `kept` of another stage, whose shards are `mine`."""
        (source,) = (each for each in mine._parameters if each.sharded_param is kept)
        (target,) = (each for each in self._parameters if each.sharded_param is other)
        target.sharded_param = source.sharded_param
        target._sharded_param_data = source._sharded_param_data  # noqa: SLF001
        target._setattr_on_modules(kept)  # noqa: SLF001

    def data_groups(self) -> list[tuple[dist.ProcessGroup, ...]]:
        """For each parameter group: the process groups its gradients are reduced over."""
        found = []
        for group in self._groups:
            names = ("shard_process_group", "replicate_process_group")
            groups = [getattr(group.mesh_info, name, None) for name in names]
            found.append(tuple([each for each in groups if each is not None]))
        return found

    def copies(self) -> Iterator[tuple[str, nn.Parameter, dist.ProcessGroup]]:
        """The names of parameters of which other ranks hold the same part, and which ranks do."""
        for group in self._groups:
            others = getattr(group.mesh_info, "replicate_process_group", None)
            if others is not None:
                yield from ((each._param_fqn, each.sharded_param, others) for each in group.fsdp_params)  # noqa: SLF001

    # --- in a step ---------------------------------------------------------------------------------

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Nothing is reduced or let go of but by the calls below."""
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
        """Gather everything for a moment, if gradients are summed in a type of their own.

        For them torch asks even a module that is never used for its gathered parameters.
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
        """Begin to gather the parameters."""
        for group in self._groups:
            group.unshard(async_op=True)

    def reshard(self) -> None:
        """Let go of what was gathered."""
        for group in self._groups:
            group.wait_for_unshard()  # a module was not used: what was gathered for it is old by the next step
            group.reshard()

    def keep_gradients(self) -> None:
        """After W: where gradients are summed in a type of their own, the new ones go there at once."""
        for each in self._cast:
            if hasattr(each, "_unsharded_param"):
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Begin to reduce the gradients; on a device the others go on computing meanwhile."""
        for group in reversed(self._groups):
            group.reduce_grads = True
            group.post_backward()
            group.reduce_grads = False
            group._training_state = self._idle  # noqa: SLF001

    def finish(self, *, reduces: bool) -> None:
        """The end of a step: reduce what was not reduced yet, wait for it, and let go of all parameters."""
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
        """A step failed: what it gathered and the gradients that it did not reduce are lost."""
        for group in self._groups:
            group._all_gather_result = None  # noqa: SLF001 -- the other side may never send it
        for each in self._parameters:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each.unsharded_param.grad = None
        for root in self._roots:
            root._reset_iter_state()  # noqa: SLF001
