"""`split`: the stages of a model: an `nn.Sequential`, a decoder of transformers or a traced module.

    model = nn.Sequential(OrderedDict(embed=..., layers=nn.Sequential(a, b, c, d), head=...))
    split(model, at=["layers.1", "layers.3"])

    stage 0     embed   layers.0
    stage 1             layers.1  layers.2
    stage 2                                 layers.3    head

The stages hold the modules of the model under their old names, so that the `state_dict()`s of all stages
together are the `state_dict()` of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.arguments import printable, some
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, even_layout, layout_of_counts, parse_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.stage_starts import check_starts, has_hooks
from penstock.runtime.models.traced import modules_in_order, split_traced


def split(
    model: nn.Module, at: Sequence[str] | None = None, *, layout: str | PipelineLayout | None = None
) -> dict[int, nn.Module]:
    """Return the stages of a model by number.

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
    names = None if at is None else list(at)
    if isinstance(model, GraphModule):
        stages = split_traced(model, names)
    elif is_pretrained(model):
        stages = _split_decoder(Decoder(model), names, layout)
    else:
        stages = _split_sequential(model, names, layout)
    _record_shared_tensors(stages)
    return stages


def split_evenly(model: nn.Module, stages: int) -> dict[int, nn.Module]:
    """Return that many stages of a model, with about the same number of modules or layers.

    An `nn.Sequential` is split between the modules that it runs, also inside nested containers, and a traced
    module between the modules that it calls.
    """
    if is_pretrained(model):
        return split(model, layout=even_layout(Decoder(model).layers, stages))
    if isinstance(model, GraphModule):
        names = modules_in_order(model)
    else:
        names = [name for name in _starts(model) if not _is_plain_sequential(model.get_submodule(name))]
    if names and stages > len(names):
        raise PartitionError(
            f"{stages} stages need at least {stages} modules, but the model runs {len(names)} in sequence: use "
            "fewer ranks, or fewer stages per rank"
        )
    each, rest = divmod(max(len(names), stages), stages)
    firsts = [stage * each + max(0, stage - (stages - rest)) for stage in range(1, stages)]
    # a model that cannot be split has no names; split() reports why
    return split(model, at=[names[first] if names else "" for first in firsts])


def _split_decoder(
    decoder: Decoder, names: list[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    if names is None:
        return decoder.stages(parse_layout(str(layout), decoder.layers, mtp_layers=0))
    starts = decoder.starts
    check_starts(decoder.model, names, starts)
    bounds = [0, *(starts[name] - 1 for name in names), decoder.layers]
    return decoder.stages(layout_of_counts([end - start for start, end in pairwise(bounds)]))


# --- tensors of several stages ---------------------------------------------------------------------


def _record_shared_tensors(stages: Mapping[int, nn.Module]) -> None:
    """Set the attributes `tied` and `split_stage` on every stage, and reject buffers of several stages.

    `tied` has, for each weight that several stages hold, its name by stage. The tuple is the same in every
    stage, in the order of the first stages. `split_stage` is the number of the stage and a description of all
    stages, which ranks compare to find out whether they split the model in the same way.
    """
    shared = _shared(stages, lambda module: module.named_buffers())
    if shared:
        listed = [
            " and ".join(f"{name!r} in stage {stage}" for stage, name in places.items()) for places in shared
        ]
        raise PartitionError(
            f"these buffers are one tensor in several stages: {some(listed, separator='; ')}. Each stage would "
            "update its own copy, and the copies would diverge: split so that one stage has them all, or give "
            "each its own buffer"
        )
    tied = tuple(_shared(stages, lambda module: module.named_parameters(remove_duplicate=False)))
    descriptions = []
    for module in stages.values():
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        span = f", {names[0]} to {names[-1]}" if names else ""
        descriptions.append(f"{len(names)} parameters{span}")
    for stage, module in stages.items():
        vars(module)["tied"] = tied  # not through nn.Module, which may have a child of this name
        vars(module)["split_stage"] = stage, tuple(descriptions)


def _shared(
    stages: Mapping[int, nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> list[dict[int, str]]:
    """The tensors that several stages hold: the name of each by stage."""
    names: dict[int, dict[int, str]] = {}
    for stage, module in stages.items():
        for name, tensor in named(module):
            names.setdefault(id(tensor), {}).setdefault(stage, name)
    return [by_stage for by_stage in names.values() if len(by_stage) > 1]


# --- nn.Sequential ---------------------------------------------------------------------------------


def _split_sequential(
    model: nn.Module, names: list[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    if names != [] and not _is_plain_sequential(model):
        kind = printable(type(model).__name__)
        why = "overrides forward()" if isinstance(model, nn.Sequential) else "is not an nn.Sequential"
        raise PartitionError(
            f"split() splits models that only run their children in sequence, but {kind} {why}, so split() "
            "cannot know what happens between its children. Trace it with torch.fx.symbolic_trace and split "
            "the result, write one module for each stage and pass them to Pipeline, or put the children into "
            "an nn.Sequential"
        )
    if names is None:
        names = _names_from_layout(model, str(layout))
    if not names:
        return {0: model}
    starts = _starts(model)
    containers = _container_problems(model, [name for name in names if name in starts], starts)
    check_starts(model, names, starts, containers)
    bounds = [0, *(starts[name] for name in names), _leaf_count(model)]
    stages = [_SequentialStage(_children_between(model, start, end)) for start, end in pairwise(bounds)]
    for stage in stages:
        stage.training = model.training  # of this container only: each child has its own
    stages[-1].is_last_stage = True
    return dict(enumerate(stages))


class _SequentialStage(nn.Sequential):
    """The modules before the next stage's first module; a tuple travels on as positional arguments."""

    is_last_stage = False

    def forward(self, *inputs: Any) -> Any:
        """Run the children in sequence; several arguments are the tuple that the previous stage returned."""
        value = inputs[0] if len(inputs) == 1 else inputs
        for child in self:
            value = child(value)
        # the next stage would receive (x,) as x; nested in another tuple, it receives (x,)
        return (value,) if not self.is_last_stage and type(value) is tuple and len(value) == 1 else value


def _children_between(container: nn.Module, first: int, end: int) -> OrderedDict[str, nn.Module]:
    """The children with the leaves from `first` to before `end`; a split child becomes a new container."""
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    begin = 0
    for name, child in _children(container).items():
        after = begin + _leaf_count(child)
        if first <= begin and after <= end:
            kept[name] = child
        elif first < after and begin < end:
            kept[name] = part = nn.Sequential(_children_between(child, first - begin, end - begin))
            part.training = child.training
        begin = after
    return kept


def _children(container: nn.Module) -> dict[str, nn.Module]:
    """The children by name; a module with two names appears twice, because it runs twice."""
    every = container.named_modules(remove_duplicate=False)
    return {name: module for name, module in every if name and "." not in name}


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module only runs its children in sequence."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return isinstance(module, nn.Sequential) and not own_forward


def _leaf_count(module: nn.Module) -> int:
    """The number of modules that run in sequence, also inside nested containers; 1 for any other module."""
    if not _is_plain_sequential(module):
        return 1
    return sum(map(_leaf_count, _children(module).values())) or 1


def _starts(module: nn.Module, prefix: str = "", position: int = 0) -> dict[str, int]:
    """Where stages can begin: the modules that run in sequence, and the number of leaves before each."""
    found: dict[str, int] = {}
    if _is_plain_sequential(module):
        for name, child in _children(module).items():
            found |= {prefix + name: position, **_starts(child, f"{prefix}{name}.", position)}
            position += _leaf_count(child)
    return found


def _container_problems(model: nn.Module, names: Sequence[str], starts: Mapping[str, int]) -> list[str]:
    """What containers that are split would lose: only their children become parts of the stages."""
    containers = {
        outer: model.get_submodule(outer)
        for name in names
        for outer in ("", *accumulate(name.split(".")[:-1], "{}.{}".format))
        if starts.get(outer, 0) < starts[name]
    }
    problems = []
    for name, container in containers.items():
        what = f"the container {name!r}" if name else "the model itself"
        if has_hooks(container):
            problems.append(f"{what} is split and has hooks, which would never run: put them on its children")
        tensors = [*container.parameters(recurse=False), *container.buffers(recurse=False)]
        if tensors or type(container).get_extra_state is not nn.Module.get_extra_state:
            problems.append(
                f"{what} is split and has parameters, buffers or other state of its own, which would belong to "
                "no stage: move them into one of its children"
            )
    return problems


def _names_from_layout(model: nn.Module, layout: str) -> list[str]:
    """The first modules of all stages but the first, where one child of the model has all its layers."""
    children = _children(model)
    containers = [name for name, child in children.items() if _is_plain_sequential(child)]
    if len(containers) != 1:
        found = f"{len(containers)}: {some(list(map(repr, containers)))}" if containers else "none"
        raise PartitionError(
            "a layout of an nn.Sequential needs one nn.Sequential inside it with the layers (t), between the "
            f"embedding (E) and the head (L), and here there is {found}. Split by names with `at=`"
        )
    names = list(children)
    place = names.index(containers[0])
    layers = [f"{containers[0]}.{name}" for name in _children(children[containers[0]])]
    stages = parse_layout(layout, len(layers), mtp_layers=0)
    empty = [number for number, stage in enumerate(stages) if stage.is_empty]
    problems = [f"stage {number} is empty, and here each stage needs a module: remove a |" for number in empty]
    if not place and not stages[0].layers:
        problems.append(f"stage 0 has only E, but nothing comes before the layers, {containers[0]!r}")
    if place == len(names) - 1 and not stages[-1].layers:
        problems.append(f"the last stage has only L, but nothing comes after the layers, {containers[0]!r}")
    if problems:
        raise PartitionError("\n".join(problems))
    return [layers[stage.layers[0]] if stage.layers else names[place + 1] for stage in stages[1:]]
