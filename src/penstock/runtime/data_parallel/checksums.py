"""Checksums of tensors, by which ranks check that their copies of a parameter are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.arguments import some
from penstock.errors import PipelineError
from penstock.runtime.dtensors import local
from penstock.runtime.transport.transport_errors import transport_errors


class ReplicatedParameter(NamedTuple):
    """A parameter, or a shard of one, that other ranks hold as well."""

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The ranks that hold it."""


def checksum(tensor: Tensor) -> Tensor:
    """Return an integer that changes when any bit of the local tensor changes, except for rare collisions."""
    values = local(tensor.detach()).contiguous().reshape(-1)
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    if values.is_complex():
        values = torch.view_as_real(values)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(integer).sum(dtype=torch.int64) & (2**62 - 1)  # so that it can be negated


def differing(checksums: Tensor, all_reduce_max: Callable[[Tensor], Tensor]) -> list[bool]:
    """Return which checksums differ between ranks; `all_reduce_max` takes the maximum over the ranks."""
    largest, smallest = all_reduce_max(torch.stack([checksums, -checksums])).tolist()
    return [high != -low for high, low in zip(largest, smallest)]


def require_equal_replicas(replicated: Iterable[ReplicatedParameter]) -> None:
    """Raise if replicas hold different values: averaged gradients would not train one model then."""
    by_group: dict[dist.ProcessGroup, list[ReplicatedParameter]] = {}
    for each in replicated:
        by_group.setdefault(each.group, []).append(each)
    different = []
    for group, parameters in by_group.items():
        checksums = torch.stack([checksum(each.parameter) for each in parameters])
        differs = differing(checksums, partial(_all_reduce_max, group=group))
        different += [each.name for each, is_different in zip(parameters, differs) if is_different]
    if different:
        raise PipelineError(
            f"replicas must hold the same values, but those of {some(different)} differ: start every replica "
            "from the same seed or checkpoint"
        )


def _all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    with transport_errors():
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
    return values
