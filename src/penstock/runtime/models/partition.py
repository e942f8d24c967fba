"""`split`: the stages of a model: an `nn.Sequential`, a decoder of transformers or a traced module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn
from torch.fx import GraphModule

from penstock.arguments import printable
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, even_layout, layout_of_counts, parse_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.sequential import split_sequential
from penstock.runtime.models.stage_starts import order_problems, unknown_name
from penstock.runtime.models.traced import modules_in_order, split_traced

# Tensors that several stages of a split model hold: weights are recorded in the stages, buffers rejected.


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


# `split`: the stages of a model: an `nn.Sequential`, a decoder of transformers or a traced module.
#
# The stages hold the modules of the model under their old names, so that the `state_dict()`s of all stages
# together are that of the model.


def split(
    model: nn.Module, at: Sequence[str] | None = None, *, layout: str | PipelineLayout | None = None
) -> dict[int, nn.Module]:
    """The stages of a model by number.

    `at`      names from `model.named_modules()`, each the first module of a new stage
    `layout`  the number of layers of each stage, as in "Et*3|(tt|)*2,t|L"; see `penstock.planning.layout`

    The model is an `nn.Sequential`, with others nested in it, a decoder of transformers, or a traced module
    (`torch.fx.symbolic_trace(model)`, `torch.export.export(model, ...).module()`), in which values may skip
    stages. The stages share their modules with the model. Without a name there is one stage, for an
    `nn.Sequential` or a traced module the model itself. Every stage has the attribute `tied`: for each weight
    that several stages hold, its name by stage. Those of a traced module have `stage_graph`: which stage feeds
    which.
    """
    if (at is None) == (layout is None):
        which = "neither of them is given" if at is None else "both are given"
        raise PartitionError(f"split() takes either `at`, a list of names, or `layout`, and {which}")
    if isinstance(at, str):
        raise PartitionError(f"`at` is a list of names (given the text {printable(repr(at))}): write [{at!r}]")
    if isinstance(model, GraphModule):
        stages = split_traced(model, at, layout)
    else:
        split_model = _split_decoder if is_pretrained(model) else split_sequential
        stages = split_model(model, at, layout)
    record_tied_weights(stages)
    return stages


def _split_decoder(
    model: nn.Module, at: Sequence[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    decoder = Decoder(model)
    if layout is not None:
        return decoder.stages(parse_layout(str(layout), decoder.layers, mtp_layers=0))
    starts = decoder.starts
    names = list(at or ())
    known = [name for name in names if isinstance(name, str) and name in starts]
    valid = [name for name, start in starts.items() if start]
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = [unknown_name(name, valid, exists=name in modules) for name in names if name not in known]
    problems += order_problems([(name, starts[name]) for name in known])
    if problems:
        raise PartitionError("\n".join(problems))
    bounds = [0, *(starts[name][0] - 1 for name in names), decoder.layers]
    return decoder.stages(layout_of_counts([end - start for start, end in pairwise(bounds)]))


# `split_evenly`: a model split into any number of stages with about the same number of modules or layers.


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
