"""Tensors that several stages hold: weights are written down in the stages, buffers are refused."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from penstock.errors import PartitionError

__all__ = ["note_tied_weights"]

_SHOWN = 8


def note_tied_weights(stages: Mapping[int, nn.Module]) -> None:
    """Give every stage `tied`: for each weight that several stages hold, its name by stage.

    The tuple is the same in every stage, in the order of the first holders. `cut` is which stage it is, and
    what all of them are.
    """
    _refuse_shared_buffers(stages)
    names: dict[int, dict[int, str]] = {}
    for stage, module in stages.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), {}).setdefault(stage, name)
    tied = tuple(holders for holders in names.values() if len(holders) > 1)
    parts = tuple(_first_and_last(module) for module in stages.values())
    for stage, module in stages.items():
        vars(module)["tied"] = tied  # past nn.Module, which may know a child of this name
        vars(module)["cut"] = stage, parts


def _first_and_last(module: nn.Module) -> str:
    """A stage in words, by which ranks see that they have cut a model in the same way."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return f"{len(names)} parameters" + (f", {names[0]} to {names[-1]}" if names else "")


def _refuse_shared_buffers(stages: Mapping[int, nn.Module]) -> None:
    homes: dict[int, dict[int, str]] = {}
    for stage, module in stages.items():
        for name, buffer in module.named_buffers():
            homes.setdefault(id(buffer), {})[stage] = name
    torn = [places for places in homes.values() if len(places) > 1]
    if torn:
        told = "; ".join(
            " and ".join(f"{name!r} in stage {stage}" for stage, name in places.items())
            for places in torn[:_SHOWN]
        )
        more = f"; and {len(torn) - _SHOWN} more" if len(torn) > _SHOWN else ""
        raise PartitionError(
            f"these buffers are one tensor in several stages: {told}{more}. Each stage would change its own, "
            "and nobody would add them up: cut so that they land in one stage, or give each its own"
        )
