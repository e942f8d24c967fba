"""Pipelines of two linear stages on a mesh of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from penstock import PenstockError, build
from penstock.runtime import Pipeline

WIDTH = 4
SCHEDULE = build("1f1b", ranks=2, microbatches=2)


def mesh_of_four(inner: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", inner))


def linear(seed: int, outputs: int = WIDTH) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, outputs).double()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def pipeline_of(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Pipeline:
    arguments = {"loss": functional.mse_loss, "group": mesh["pp"], "timeout": 15.0, **options}
    return Pipeline([module], SCHEDULE, **arguments)


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return str(error)
    return ""
