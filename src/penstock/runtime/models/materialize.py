"""`materialize`: allocate and initialize a stage that was created on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from penstock.arguments import some
from penstock.errors import PartitionError, PipelineError
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.models.decoders import is_pretrained
from penstock.runtime.torch_internals.autograd import version
from penstock.runtime.torch_internals.modules import replace_tensors, reset_method

_replaced: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
"""Parameters that `materialize` has replaced, by name; only an optimizer keeps them alive."""


def materialize(stage: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Allocate the meta tensors of a stage, initialize them as their modules do, and return the stage.

    Its parameters are new objects, so an optimizer must be created afterwards. Models of transformers have
    `initialize_weights`; other modules have `reset_parameters`, which must also set their buffers. Tensors that
    are already allocated keep their values and move to the device. A tied weight starts with the same values in
    every stage, if all ranks call `torch.manual_seed` with the same seed and the modules that hold the weight
    initialize it in the same way.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise PartitionError(
            "materialize() allocates memory, and the meta device has none: pass another device"
        )
    unallocated = [
        module for module in stage.modules() if all(tensor.is_meta for _, tensor in _named_tensors(module))
    ]
    meta_names = {name for name, tensor in _named_tensors(stage) if tensor.is_meta}
    before = dict(stage.named_parameters())
    _allocate(stage, device)
    after = dict(stage.named_parameters())
    for name, parameter in before.items():
        if after.get(name) is not parameter:
            _replaced[parameter] = name
    if _replaced:
        _hook_optimizers()
    versions = {name: version(tensor) for name, tensor in _named_tensors(stage)}
    initialize = _initialize_transformers if is_pretrained(stage) else _reset_parameters
    with torch.no_grad():
        initialize(stage, unallocated)
        for seed, owner in _owners_of_tied_weights(stage, meta_names):
            forked = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(forked, device_type=device.type):
                torch.manual_seed(seed)
                initialize(stage, [owner])
            # the embedding of a decoder leaves this row zero, also if the stage only has the tied head
            padding = getattr(stage.base_model, "padding_idx", None) if is_pretrained(stage) else None
            if padding is not None:
                owner.get_parameter("weight")[padding] = 0
    uninitialized = [
        repr(name)
        for name, tensor in _named_tensors(stage)
        if name in meta_names and not _is_initialized(tensor, versions[name])
    ]
    if uninitialized:
        raise PartitionError(
            f"no module initializes these tensors, so they hold no valid values: {some(uninitialized, 12)}. "
            "Give their modules a reset_parameters() that sets them, including buffers, or create this stage "
            "on a real device"
        )
    return stage


def _named_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    yield from stage.named_buffers()


def _allocate(stage: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by tensors of an invalid value that is easy to detect; tied weights stay tied."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            homes.setdefault(id(parameter), []).append((module, name))
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if id(tensor) not in made:
            made[id(tensor)] = torch.full_like(tensor, _invalid(tensor.dtype), device=device)
        return made[id(tensor)]

    replace_tensors(stage, moved)
    for (first, name), *others in homes.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(first, name))


def _invalid(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_initialized(tensor: Tensor, before: int) -> bool:
    """Whether all values were set, as far as this can be detected."""
    if tensor.is_meta:
        return False
    tensor = tensor.detach()
    here = tensor.to_local() if is_dtensor(tensor) else tensor
    if here.is_floating_point() or here.is_complex():
        return not bool(here.isnan().any())
    return version(tensor) != before or not bool((here == _invalid(here.dtype)).all())


def _initialize_transformers(stage: Any, modules: Sequence[nn.Module]) -> None:
    wanted = set(modules)
    for module in stage.modules():
        module._is_hf_initialized = module not in wanted  # noqa: SLF001 -- transformers skips initialized modules
    stage.initialize_weights()


def _reset_parameters(_stage: nn.Module, modules: Sequence[nn.Module]) -> None:
    for module in reversed(modules):  # children before parents
        if callable(reset := reset_method(module)):
            reset()


def _owners_of_tied_weights(stage: nn.Module, meta_names: set[str]) -> Iterator[tuple[int, nn.Module]]:
    """The modules with a weight that other stages hold too, and the seed that all stages use for it."""
    for number, tie in enumerate(getattr(stage, "tied", ())):
        for name in tie.values():
            if name in meta_names:
                yield torch.initial_seed() + number + 1, stage.get_submodule(name.rpartition(".")[0])


# An optimizer that was created before `materialize` holds parameters that never get a gradient, and raises at
# its first step.


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise if the optimizer holds a replaced parameter."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]] if _replaced else []
    names = [repr(_replaced[parameter]) for parameter in held if parameter in _replaced]
    if names:
        raise PipelineError(
            f"{len(names)} of {len(held)} parameters of this {type(optimizer).__name__} were replaced by "
            f"materialize() after it was created, and would not be trained: {some(names, 4)}. Create the "
            "optimizer after materialize(), as with pipeline.parameters()"
        )
