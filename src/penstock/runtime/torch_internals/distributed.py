"""Process groups, meshes, DTensors, and the index of torch's distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from penstock.runtime.torch_internals.registry import Feature

CONNECTIONS = Feature("connections between ranks", without="pipelines of one rank")
ABORTS = Feature("aborting other process groups after a failure", without="waits that end by timeout")
MESHES = Feature("tensor parallelism (DTensors in stages)", without="stages without DTensors")
CHECKPOINTS = Feature("checkpoints", without="training, and torch.save of each stage")

_OPTIONS = "torch._C._distributed_c10d.Backend.Options._timeout"

local_tensor: Callable[[Tensor], Tensor] = MESHES.field("torch.distributed.tensor.DTensor._local_tensor")
"""Return the local tensor of a DTensor, with the same memory."""

root_mesh: Callable[[DeviceMesh], DeviceMesh] = MESHES.name(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh"
)
"""Return the mesh that a mesh is a slice of."""

stored_part: Callable[[str, int, int], Any] = CHECKPOINTS.name(
    "torch.distributed.checkpoint.filesystem._StorageInfo"
)
"""Return where a tensor is stored: file, offset and length."""

file_part: Callable[[IO[bytes], int, int], IO[bytes]] = CHECKPOINTS.name(
    "torch.distributed.checkpoint.utils._create_file_view"
)
"""Return a part of a file, from an offset and with a length, as a file."""


def is_masked_partial(placement: object) -> bool:
    """Return whether a placement is the partial sum of an embedding with a sharded vocabulary."""
    return type(placement).__name__ == "_MaskPartial"


@CHECKPOINTS.uses("torch.distributed.tensor.DTensor.__create_chunk_list__")
def local_slices(tensor: Any) -> tuple[slice, ...]:
    """Return the part of the full tensor that a DTensor has on this rank."""
    part = tensor.__create_chunk_list__()[0]
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes))


@CONNECTIONS.uses("torch.distributed.ProcessGroupGloo._Options", _OPTIONS)
def new_gloo_group(store: Store, rank: int, size: int, devices: Sequence[Any], timeout: timedelta) -> Any:
    """Return a gloo group that is not registered with torch.distributed."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = list(devices), timeout
    return gloo(store, rank, size, options)


@CONNECTIONS.uses(_OPTIONS)
def new_nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a NCCL group that is not registered with torch.distributed."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


@CONNECTIONS.uses("torch.distributed.ProcessGroup._get_backend", _OPTIONS)
def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return how long the operations of a group on a device wait; None for a backend without a timeout."""
    try:
        found: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend of another kind, or none for this device
        return None
    return found


@ABORTS.uses("torch.distributed.distributed_c10d._world")
def abort_registered_groups() -> None:
    """Abort all process groups that torch.distributed has made."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # gloo has no abort
            group.abort()
