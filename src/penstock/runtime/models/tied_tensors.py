"""Tensors that several stages of a split model hold: weights are recorded in the stages, buffers rejected."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from penstock.errors import PartitionError

__all__ = ["record_tied_weights"]

_SHOWN = 8


def record_tied_weights(stages: Mapping[int, nn.Module]) -> None:
    """Set the attributes `tied` and `split_stage` on every stage.

    `tied` has, for each weight that several stages hold, its name by stage. The tuple is the same in every
    stage, in the order of the first stages. `split_stage` is the number of the stage and a description of all
    stages.
    """
    _check_buffers(stages)
    names: dict[int, dict[int, str]] = {}
    for stage, module in stages.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), {}).setdefault(stage, name)
    tied = tuple(by_stage for by_stage in names.values() if len(by_stage) > 1)
    descriptions = tuple(_description(module) for module in stages.values())
    for stage, module in stages.items():
        vars(module)["tied"] = tied  # not through nn.Module, which may have a child of this name
        vars(module)["split_stage"] = stage, descriptions


def _description(module: nn.Module) -> str:
    """A stage in short; ranks compare these to find out whether they split the model in the same way."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return f"{len(names)} parameters" + (f", {names[0]} to {names[-1]}" if names else "")


def _check_buffers(stages: Mapping[int, nn.Module]) -> None:
    homes: dict[int, dict[int, str]] = {}
    for stage, module in stages.items():
        for name, buffer in module.named_buffers():
            homes.setdefault(id(buffer), {})[stage] = name
    shared = [places for places in homes.values() if len(places) > 1]
    if shared:
        listed = "; ".join(
            " and ".join(f"{name!r} in stage {stage}" for stage, name in places.items())
            for places in shared[:_SHOWN]
        )
        more = f"; and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        raise PartitionError(
            f"these buffers are one tensor in several stages: {listed}{more}. Each stage would update its own "
            "copy, and the copies would diverge: split so that one stage has them all, or give each its own "
            "buffer"
        )
