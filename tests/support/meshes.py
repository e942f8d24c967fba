"""Meshes of gloo groups, made once for each shape."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["mesh_of_ranks"]

_made: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def mesh_of_ranks(**sizes: int) -> DeviceMesh:
    """Dimensions by name, the outermost first."""
    key = tuple(sizes.items())
    if key not in _made:
        names = tuple(sizes)
        _made[key] = init_device_mesh(
            "cpu",
            tuple(sizes.values()),
            mesh_dim_names=names,
            backend_override=dict.fromkeys(names, _one_thread()),
        )
    return _made[key]


def _one_thread() -> tuple[str, Any]:
    """With two threads, a worker crashed with a corrupted heap twice in some hundred runs, inside gloo."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device()]
    options._threads = 1
    options._timeout = timedelta(seconds=300)
    return "gloo", options
