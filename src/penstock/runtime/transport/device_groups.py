"""Which process groups the messages of a pipeline use, by the device that they are on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.errors import PipelineError

__all__ = ["MessageGroup", "device_group", "single_group_suffices"]


class MessageGroup(Protocol):
    """The methods of a process group that are used; torch does not annotate them."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Start to send."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Start to receive."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Every rank's tensor."""

    def allreduce(self, tensors: list[Tensor], options: Any = ...) -> dist.Work:
        """The sum, or another reduction, in place."""

    def barrier(self) -> dist.Work:
        """Wait for all ranks."""

    def abort(self) -> None:
        """End all waits."""


def single_group_suffices(device: torch.device) -> bool:
    """Whether messages with different tags can overtake each other in one group, as in gloo."""
    return device.type == "cpu"


def device_group(
    device: torch.device, store: Store, rank: int, timeout: timedelta, size: int = 2
) -> MessageGroup:
    """A group for one directed edge, in which rank 0 sends and rank 1 receives, or for a subgroup."""
    if not (device.type == "cuda" and dist.is_nccl_available()):
        raise PipelineError(f"a pipeline runs on CPUs (gloo) and CUDA devices (NCCL), not on {device}")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout  # noqa: SLF001 -- it has no public name
    group: MessageGroup = nccl(store, rank, size, options)
    return group
