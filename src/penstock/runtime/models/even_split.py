"""`split_evenly`: a model split into any number of stages with about the same number of modules or layers."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from penstock.errors import PartitionError
from penstock.planning.layout import even_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.partition import split
from penstock.runtime.models.traced import modules_in_order

__all__ = ["split_evenly"]


def split_evenly(model: nn.Module, stages: int) -> dict[int, nn.Module]:
    """The stages of a model by number; see `split` for the models it supports.

    An `nn.Sequential` is split between the modules that it runs, also inside nested containers, and a traced
    module between the modules that it calls.
    """
    if is_pretrained(model):
        return split(model, layout=even_layout(Decoder(model).layers, stages))
    names = modules_in_order(model) if isinstance(model, GraphModule) else _leaf_names(model)
    if names and stages > len(names):
        raise PartitionError(
            f"{stages} stages need at least {stages} modules, but the model runs {len(names)} in sequence: use "
            "fewer ranks, or fewer stages per rank"
        )
    each, rest = divmod(max(len(names), stages), stages)
    firsts = [stage * each + max(0, stage - (stages - rest)) for stage in range(1, stages)]
    # a model that cannot be split has no names; split() reports why
    return split(model, at=[names[first] if names else "" for first in firsts])


def _leaf_names(module: nn.Module, prefix: str = "") -> list[str]:
    """The names of the modules that run in sequence, without the containers that only run them."""
    if type(module).forward is not nn.Sequential.forward:
        return [prefix] if prefix else []
    children = (
        (name, child)
        for name, child in module.named_modules(remove_duplicate=False)
        if name and "." not in name
    )
    return [
        found
        for name, child in children
        for found in _leaf_names(child, f"{prefix}.{name}" if prefix else name)
    ]
