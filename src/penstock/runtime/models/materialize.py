"""A stage that was made on the meta device gets memory, and the numbers its own class starts with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.models.decoders import is_pretrained

__all__ = ["materialize"]

_SHOWN = 12


def materialize(stage: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give memory on a device to what has none, and initialise it as the modules themselves do.

    Models of transformers know how (`initialize_weights`); other modules have `reset_parameters`, which must
    set their buffers too. What has memory already keeps its numbers and goes to the device. A weight that
    several stages hold starts with the same numbers in each, if the ranks gave the same `torch.manual_seed`
    and the modules that hold it start in the same way. Gives the stage itself.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise PartitionError("materialize() gives memory, and the meta device has none: name another")
    without_memory = [module for module in stage.modules() if _has_no_memory(module)]
    empty = {name for name, tensor in _named_tensors(stage) if tensor.is_meta}
    _give_memory(stage, device)
    versions = {name: tensor._version for name, tensor in _named_tensors(stage)}  # noqa: SLF001
    initialise = _as_transformers_does if is_pretrained(stage) else _as_torch_does
    with torch.no_grad():
        initialise(stage, without_memory)
        for seed, owner in _owners_of_tied_weights(stage, empty):
            with _own_random_state(device):
                torch.manual_seed(seed)
                initialise(stage, [owner])
            if (padding := _padding_of(stage)) is not None:
                owner.get_parameter("weight")[padding] = 0
    left = [
        name
        for name, tensor in _named_tensors(stage)
        if name in empty and not _is_written(tensor, versions[name])
    ]
    if left:
        raise PartitionError(_not_initialised(left))
    return stage


def _named_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    yield from stage.named_buffers()


def _has_no_memory(module: nn.Module) -> bool:
    return all(tensor.is_meta for _, tensor in _named_tensors(module))


def _give_memory(stage: nn.Module, device: torch.device) -> None:
    """Replace what has no memory by numbers that nobody can mistake for good ones; ties stay."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            homes.setdefault(id(parameter), []).append((module, name))
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if id(tensor) not in made:
            made[id(tensor)] = torch.full_like(tensor, _unset(tensor.dtype), device=device)
        return made[id(tensor)]

    stage._apply(moved)  # type: ignore[no-untyped-call]  # noqa: SLF001 -- what `to()` and `to_empty()` are made of, and sharding listens to
    for (first, name), *others in homes.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(first, name))


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_written(tensor: Tensor, version: int) -> bool:
    """Whether somebody has set all of it, as far as one can tell."""
    if tensor.is_meta:
        return False
    tensor = tensor.detach()
    here = tensor.to_local() if is_dtensor(tensor) else tensor
    if here.is_floating_point() or here.is_complex():
        return not bool(here.isnan().any())
    return tensor._version != version or not bool((here == _unset(here.dtype)).all())  # noqa: SLF001


def _as_transformers_does(stage: Any, modules: Sequence[nn.Module]) -> None:
    wanted = set(modules)
    for module in stage.modules():
        module._is_hf_initialized = module not in wanted  # noqa: SLF001 -- those that are done are left alone
    stage.initialize_weights()


def _as_torch_does(_stage: nn.Module, modules: Sequence[nn.Module]) -> None:
    for module in reversed(modules):  # children before those they are in
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()


def _own_random_state(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _owners_of_tied_weights(stage: nn.Module, empty: set[str]) -> Iterator[tuple[int, nn.Module]]:
    """The modules with a weight that other stages hold too, and the seed that those use for it."""
    for number, tie in enumerate(getattr(stage, "tied", ())):
        for name in tie.values():
            if name in empty:
                yield torch.initial_seed() + number + 1, stage.get_submodule(name.rpartition(".")[0])


def _padding_of(stage: nn.Module) -> int | None:
    """The row that the embedding of a decoder leaves zero, also where the stage has only its tied head."""
    return getattr(stage.base_model, "padding_idx", None) if is_pretrained(stage) else None


def _not_initialised(names: list[str]) -> str:
    told = ", ".join(map(repr, names[:_SHOWN])) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    return (
        f"nothing says how these start, and they are not numbers now: {told}. Give their modules a "
        "reset_parameters() that sets them, buffers too, or build this stage on a device with memory"
    )
