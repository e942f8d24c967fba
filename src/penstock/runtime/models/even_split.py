"""Any number of stages from a model, without saying where to cut: modules, or layers, shared evenly."""

from __future__ import annotations

from torch import nn

from penstock.errors import PartitionError
from penstock.planning.layout import even_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.partition import split

__all__ = ["split_evenly"]


def split_evenly(model: nn.Module, stages: int) -> dict[int, nn.Module]:
    """The stages of a model by their numbers: see `split` for which models it cuts.

    An `nn.Sequential` is cut between the modules that it runs, those of containers inside it one by one.
    """
    if is_pretrained(model):
        return split(model, layout=even_layout(Decoder(model).layers, stages))
    names = _names_of_modules(model)
    if names and stages > len(names):
        raise PartitionError(
            f"{stages} stages need as many modules, but the model runs {len(names)} one after the other: use "
            "fewer ranks, or fewer stages per rank"
        )
    each, rest = divmod(max(len(names), stages), stages)
    firsts = [stage * each + max(0, stage - (stages - rest)) for stage in range(1, stages)]
    # of a model that cannot be cut any name will do: split() says what is wrong with it
    return split(model, at=[names[first] if names else "" for first in firsts])


def _names_of_modules(module: nn.Module, inside: str = "") -> list[str]:
    """The modules that run one after the other, without the containers that only run them."""
    if type(module).forward is not nn.Sequential.forward:
        return [inside] if inside else []
    children = (
        (name, child)
        for name, child in module.named_modules(remove_duplicate=False)
        if name and "." not in name
    )
    return [
        found
        for name, child in children
        for found in _names_of_modules(child, f"{inside}.{name}" if inside else name)
    ]
