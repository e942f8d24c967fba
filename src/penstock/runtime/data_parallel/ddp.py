"""The DistributedDataParallel wrappers in the stages of a rank, whose own reductions the pipeline disables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PipelineError

__all__ = ["DdpWrappers"]


class DdpWrappers:
    """All wrappers by stage, those of the composable `replicate` included."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._switches: list[tuple[Any, str, bool]] = []
        """Objects and attributes that control reduction, and the value that disables it."""
        self._by_stage = {stage: list(self._find(stage, module)) for stage, module in modules.items()}

    def _find(self, stage: int, module: nn.Module) -> Iterator[DistributedDataParallel]:
        composable = sys.modules.get("torch.distributed._composable.replicate")
        for part in module.modules():
            wrapper = part
            if composable is not None and isinstance(part, composable.DDP):  # the wrapper is beside the module
                state = composable.replicate.state(part)
                if state._init_args:  # noqa: SLF001 -- torch creates the wrapper in the first forward
                    state.lazy_init()
                wrapper = state._ddp  # noqa: SLF001
                self._switches.append(
                    (state, "_no_sync", True)
                )  # it sets the wrapper's switch at every forward
            if isinstance(wrapper, DistributedDataParallel):
                _check_supported(wrapper, stage)
                self._switches.append((wrapper, "require_backward_grad_sync", False))
                yield wrapper

    def process_groups(self, stage: int) -> dict[nn.Parameter, dist.ProcessGroup]:
        """For each wrapped parameter of a stage: the group that its wrapper replicates it over."""
        return {
            parameter: wrapper.process_group
            for wrapper in self._by_stage[stage]
            for parameter in wrapper.parameters()
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """No wrapper reduces gradients in here."""
        before = [getattr(owner, name) for owner, name, _ in self._switches]
        try:
            for owner, name, value in self._switches:
                setattr(owner, name, value)
            yield
        finally:
            for (owner, name, _), value in zip(self._switches, before):
                setattr(owner, name, value)


def _check_supported(wrapper: DistributedDataParallel, stage: int) -> None:
    if wrapper._comm_hooks:  # noqa: SLF001
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with a communication hook, which would never "
            "run: a pipeline reduces the gradients of a stage itself, once per step"
        )
    if wrapper.static_graph:
        raise PipelineError(
            f"stage {stage} is wrapped in DistributedDataParallel with static_graph=True, which always reduces "
            "after the first backward: remove it, a pipeline reduces once per step in any case"
        )
