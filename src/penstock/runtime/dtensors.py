"""DTensors: access to their local and full tensors, and how one is sent from stage to stage.

    stage 0   rank 0 | rank 1   its mesh "tp"    each rank sends its local tensor and a `Sharding`
                 |        |
    stage 1   rank 2 | rank 3   its mesh "tp"    each rank builds the same DTensor on its own mesh

A mesh itself cannot be sent, because it names ranks. The receiver finds its own mesh with the same description.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError
from penstock.runtime.torch_internals.distributed import is_masked_partial, local_tensor, root_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether the value is a DTensor; does not import the module of DTensors."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself; it shares memory."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def whole(value: Any) -> Any:
    """Return the full tensor, detached; for a DTensor this is a collective over its mesh."""
    value = value.detach() if isinstance(value, Tensor) else value
    return value.full_tensor() if is_dtensor(value) else value


class _MeshDescription(NamedTuple):
    """What a mesh has in common with the mesh that a neighbouring stage uses."""

    device: str
    names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    """The coordinate of this rank."""

    @staticmethod
    def of(mesh: DeviceMesh) -> _MeshDescription:
        coordinate = mesh.get_coordinate()
        place = None if coordinate is None else tuple(coordinate)
        return _MeshDescription(mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), place)

    def __str__(self) -> str:
        names = self.names or [f"dimension {index}" for index in range(len(self.shape))]
        sizes = ", ".join(f"{name}: {size}" for name, size in zip(names, self.shape))
        return f"({sizes}) of {self.device}, this rank at {list(self.coordinate or ())}"


class Sharding(NamedTuple):
    """How a DTensor is sharded: everything but its local tensor."""

    mesh: _MeshDescription
    placements: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    def build(self, local_tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor with this local tensor."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- slow to load, and rarely needed

        return DTensor.from_local(local_tensor, mesh, self.placements, shape=self.shape, stride=self.strides)


def sharding_of(tensor: DTensor) -> Sharding:
    """Return how a DTensor is sharded."""
    return Sharding(_MeshDescription.of(tensor.device_mesh), tensor.placements, tensor.shape, tensor.stride())


def placement_problem(tensor: DTensor) -> str:
    """Return why a DTensor cannot be sent; empty if it can."""
    for placement in filter(is_masked_partial, tensor.placements):
        partial = "the partial sum of an embedding with a sharded vocabulary"
        return f"a DTensor with the placement {placement}, {partial}"
    return ""


class Meshes:
    """The meshes of a rank: those of its parameters and buffers, the pipeline's own, and their slices."""

    def __init__(self, modules: Iterable[nn.Module], pipeline_mesh: DeviceMesh | None = None) -> None:
        self._modules = tuple(modules)
        self._pipeline_mesh = pipeline_mesh
        self._found: dict[_MeshDescription, DeviceMesh] = {}

    def matching(self, description: _MeshDescription) -> DeviceMesh:
        """Return the one mesh with this description."""
        if description not in self._found:
            self._found[description] = self._find(description)
        return self._found[description]

    def _find(self, description: _MeshDescription) -> DeviceMesh:
        tensors = chain.from_iterable(chain(each.parameters(), each.buffers()) for each in self._modules)
        own = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
        own += [] if self._pipeline_mesh is None else [self._pipeline_mesh]
        # meshes that are equal are not the same
        known = list({id(each): each for mesh in own for each in (mesh, root_mesh(mesh))}.values())
        slices = [_slice(mesh, description.names) for mesh in known if description.names]
        matching: dict[str, DeviceMesh] = {}
        for mesh in (*known, *slices):
            if mesh is not None and _MeshDescription.of(mesh) == description:
                matching.setdefault(str(mesh.mesh.tolist()), mesh)
        if len(matching) == 1:
            return next(iter(matching.values()))
        received = f"received a DTensor on a mesh {description}, and this rank has"
        if matching:
            raise PipelineError(
                f"{received} {len(matching)} such meshes, of world ranks {' and '.join(matching)}: give their "
                "dimensions different names"
            )
        present = "; ".join(dict.fromkeys(str(_MeshDescription.of(mesh)) for mesh in known)) or "none at all"
        raise PipelineError(
            f"{received} no such mesh, but {present}: create one mesh for the whole job with named dimensions, "
            'as init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "tp")), pass group=mesh["pp"] to the '
            'pipeline and mesh["tp"] to the stages; or send plain tensors (use_local_output=True, '
            "`full_tensor()`)"
        )


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """Return the submesh of these dimensions, if the mesh has them in this order."""
    present = [name for name in mesh.mesh_dim_names or () if name in names]
    return mesh[names] if tuple(present) == names else None
