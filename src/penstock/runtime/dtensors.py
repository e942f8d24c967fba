"""Tensors that several ranks hold together (DTensor): what is told of one to a rank of another stage.

    stage 0   rank 0 | rank 1   its mesh "tp"    each rank hands on its own part, and a `Sharding`
                 |        |
    stage 1   rank 2 | rank 3   its mesh "tp"    puts the same tensor together on the mesh it knows

A mesh cannot cross, because it names ranks: it is known again by its look.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Meshes", "Sharding", "is_dtensor", "local", "sharding_of", "whole"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ranks hold it together; before the module of DTensors is loaded, there can be none."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that are on this rank, to be read and written."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001


def whole(value: Any) -> Any:
    """All of it, without its graph; of a DTensor, all ranks of its mesh must ask at once."""
    value = value.detach() if isinstance(value, Tensor) else value
    return value.full_tensor() if is_dtensor(value) else value


class _Look(NamedTuple):
    """What a mesh and the one that a neighbouring stage uses have in common."""

    device: str
    names: tuple[str, ...] | None
    shape: tuple[int, ...]
    place: tuple[int, ...] | None
    """Where in it this rank stands."""

    @staticmethod
    def of(mesh: DeviceMesh) -> _Look:
        return _Look(mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), _place(mesh))

    def __str__(self) -> str:
        names = self.names or [f"dimension {place}" for place in range(len(self.shape))]
        sizes = ", ".join(f"{name}: {size}" for name, size in zip(names, self.shape))
        return f"({sizes}) of {self.device}, this rank at {list(self.place or ())}"


def _place(mesh: DeviceMesh) -> tuple[int, ...] | None:
    place = mesh.get_coordinate()
    return None if place is None else tuple(place)


class Sharding(NamedTuple):
    """What a rank's part does not say of the whole."""

    mesh: _Look
    placements: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    def put_together(self, part: Tensor, mesh: DeviceMesh) -> DTensor:
        """The whole that this is a part of."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- slow to load, and rarely needed

        return DTensor.from_local(part, mesh, self.placements, shape=self.shape, stride=self.strides)


def sharding_of(tensor: DTensor) -> Sharding:
    """How the ranks hold it."""
    return Sharding(_Look.of(tensor.device_mesh), tensor.placements, tensor.shape, tensor.stride())


def placement_fault(tensor: DTensor) -> str:
    """Why it cannot cross; empty if it can."""
    masked = [placement for placement in tensor.placements if type(placement).__name__ == "_MaskPartial"]
    if not masked:
        return ""
    return (
        f"a DTensor with the placement {masked[0]}, the unfinished sum of an embedding that is sharded by words"
    )


class Meshes:
    """The meshes that a rank knows: those of its parameters and buffers, `given`, and their slices."""

    def __init__(self, modules: Iterable[nn.Module], given: DeviceMesh | None = None) -> None:
        self._modules = tuple(modules)
        self._given = given
        self._found: dict[_Look, DeviceMesh] = {}

    def like(self, look: _Look) -> DeviceMesh:
        """The one mesh that looks like this."""
        mesh = self._found.get(look)
        if mesh is None:
            mesh = self._found[look] = self._the_one_like(look)
        return mesh

    def _the_one_like(self, look: _Look) -> DeviceMesh:
        known = list(self._known())
        slices = [_slice(mesh, look.names) for mesh in known if look.names]
        fitting: dict[str, DeviceMesh] = {}
        for mesh in (*known, *slices):
            if mesh is not None and _Look.of(mesh) == look:
                fitting.setdefault(str(mesh.mesh.tolist()), mesh)
        if len(fitting) == 1:
            return next(iter(fitting.values()))
        came = f"a DTensor came on a mesh {look}, and this rank knows"
        if fitting:
            raise PipelineError(
                f"{came} {len(fitting)} meshes like it, of world ranks {' and '.join(fitting)}: give their "
                "dimensions different names"
            )
        there = "; ".join(dict.fromkeys(str(_Look.of(mesh)) for mesh in known)) or "none at all"
        raise PipelineError(
            f"{came} no mesh like it, but {there}: make one mesh for the whole job with named dimensions, as "
            'init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "tp")), give the pipeline group=mesh["pp"] '
            'and the stages mesh["tp"]; or hand on plain tensors (use_local_output=True, `full_tensor()`)'
        )

    def _known(self) -> Iterator[DeviceMesh]:
        """Each mesh before the one it was cut from."""
        seen: list[DeviceMesh] = []
        tensors = chain.from_iterable(chain(each.parameters(), each.buffers()) for each in self._modules)
        own = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
        for mesh in own if self._given is None else [*own, self._given]:
            for each in (mesh, mesh._get_root_mesh()):  # noqa: SLF001 -- it has no other name
                if not any(each is other for other in seen):
                    seen.append(each)
                    yield each


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The dimensions of these names, if the mesh has them, in this order."""
    there = [name for name in mesh.mesh_dim_names or () if name in names]
    return mesh[names] if tuple(there) == names else None
