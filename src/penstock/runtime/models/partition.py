"""A model comes apart into stages: one that runs its children one after the other, or a known decoder.

    model = nn.Sequential(OrderedDict(embed=..., layers=nn.Sequential(a, b, c, d), head=...))
    split(model, at=["layers.1", "layers.3"])

    stage 0     embed   layers.0
    stage 1             layers.1  layers.2
    stage 2                                 layers.3    head

The stages hold the very modules of the model under their old names, so that the `state_dict()`s of all
stages together are that of the model. Between stages a tuple travels as positional arguments, and
anything else as the one argument; the stages made here take and give values in this way. How a decoder of
transformers is cut is told in `decoders`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn

from penstock.arguments import printable, some
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, layout_of_counts
from penstock.planning.layout_text import parse_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.tied_tensors import note_tied_weights

__all__ = ["split"]

Place: TypeAlias = tuple[int, ...]
"""Where a stage begins: the index of a child, of a child of that child, and so on.

A module and the first module in it begin at the same place, so a place never ends in 0, and the
model begins at ().
"""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def split(
    model: nn.Module, at: Sequence[str] | None = None, *, layout: str | PipelineLayout | None = None
) -> dict[int, nn.Module]:
    """The stages of a model by their numbers.

    `at`      names of `model.named_modules()`, each the first module of a new stage
    `layout`  how many layers each stage has, as in "Et*3|(tt|)*2,t|L"; see `penstock.planning.layout_text`

    The model is an `nn.Sequential`, with others inside it, or a decoder of transformers. The stages share their
    modules with the model. Without a name there is one stage, of an `nn.Sequential` the model itself. Every
    stage has `tied`: for each weight that several stages hold, its name by stage.
    """
    if (at is None) == (layout is None):
        given = "none of them is given" if at is None else "both are given"
        raise PartitionError(f"split() takes either `at`, a list of names, or `layout`, and {given}")
    if isinstance(at, str):
        raise PartitionError(f"`at` is a list of names (given the text {printable(repr(at))}): write [{at!r}]")
    stages = _split_decoder(model, at, layout) if is_pretrained(model) else _split_sequential(model, at, layout)
    note_tied_weights(stages)
    return stages


def _split_decoder(
    model: nn.Module, at: Sequence[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    decoder = Decoder(model)
    if layout is not None:
        return decoder.stages(parse_layout(str(layout), decoder.layers))
    places = decoder.places
    names = list(at or ())
    known = [name for name in names if isinstance(name, str) and name in places]
    beginnings = [name for name, place in places.items() if place]
    there = dict(model.named_modules(remove_duplicate=False))
    faults = [_unknown(name, beginnings, there=name in there) for name in names if name not in known]
    faults += _order_faults([(name, places[name]) for name in known])
    if faults:
        raise PartitionError("\n".join(faults))
    bounds = [0, *(places[name][0] - 1 for name in names), decoder.layers]
    return decoder.stages(layout_of_counts([end - start for start, end in pairwise(bounds)]))


def _split_sequential(
    model: nn.Module, at: Sequence[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    if layout is not None:
        _check_model(model)
        names: Sequence[str] = _names_of_layout(model, layout)
    else:
        names = list(at or ())
    if not names:
        return {0: model}
    _check_model(model)
    places = _checked_places(model, names)
    bounds = [(), *places]
    ends: list[Place | None] = [*places, None]
    parts = [
        _Part(_children_between(model, start, end), training=model.training, last=end is None)
        for start, end in zip(bounds, ends)
    ]
    return dict(enumerate(parts))


def _names_of_layout(model: nn.Module, layout: str | PipelineLayout) -> list[str]:
    """The first modules of the stages after the first, where one child of the model has all its layers."""
    children = _children(model)
    containers = [name for name, child in children.items() if _runs_in_order(child)]
    if len(containers) != 1:
        found = f"{len(containers)}: {some(list(map(repr, containers)))}" if containers else "none"
        raise PartitionError(
            "a layout of an nn.Sequential needs one nn.Sequential inside that has the layers (t), between the "
            f"embedding (E) and the head (L), and here there is {found}. Cut by names with `at=`"
        )
    names = list(children)
    place = names.index(containers[0])
    layers = [f"{containers[0]}.{name}" for name in _children(children[containers[0]])]
    stages = parse_layout(str(layout), len(layers))
    faults = []
    if not place and not stages[0].layers:
        faults.append(f"stage 0 has E alone, but nothing comes before the layers, {containers[0]!r}")
    if place == len(names) - 1 and not stages[-1].layers:
        faults.append(f"the last stage has L alone, but nothing comes after the layers, {containers[0]!r}")
    if faults:
        raise PartitionError("\n".join(faults))
    return [layers[stage.layers[0]] if stage.layers else names[place + 1] for stage in stages[1:]]


class _Part(nn.Sequential):
    """A stage: what comes before the next stage's first module."""

    def __init__(self, children: OrderedDict[str, nn.Module], *, training: bool, last: bool) -> None:
        super().__init__(children)
        self.training = training  # of this container alone: the children have their own
        self._is_last_stage = last

    def forward(self, *given: Any) -> Any:
        """The children one after the other; several arguments are the tuple that the stage before gave."""
        value = given[0] if len(given) == 1 else given
        for child in self:
            value = child(value)
        # (x,) would arrive as x: as the only entry of another tuple it arrives as it is
        return (value,) if not self._is_last_stage and type(value) is tuple and len(value) == 1 else value


def _children_between(container: nn.Module, start: Place, end: Place | None) -> OrderedDict[str, nn.Module]:
    """The children from one place to before another, those that are cut as new containers of what is left."""
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (name, child) in enumerate(_children(container).items()):
        child_start = start[1:] if start[:1] == (index,) else ()
        child_end = end[1:] if end is not None and end[:1] == (index,) else None
        if (index,) < start[:1] or (end is not None and (index,) >= end[:1] and not child_end):
            continue
        if child_start or child_end:
            cut = nn.Sequential(_children_between(child, child_start, child_end))
            cut.training = child.training
            kept[name] = cut
        else:
            kept[name] = child
    return kept


def _children(container: nn.Module) -> dict[str, nn.Module]:
    """The children by name; one module under two names is there twice, as it runs twice."""
    every = container.named_modules(remove_duplicate=False)
    return {name: module for name, module in every if name and "." not in name}


# --- what cannot be split --------------------------------------------------------------------------


def _runs_in_order(module: nn.Module) -> bool:
    """Whether a module does nothing but run its children one after the other."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return isinstance(module, nn.Sequential) and not own_forward


def _check_model(model: nn.Module) -> None:
    if _runs_in_order(model):
        return
    kind = printable(type(model).__name__)
    why = "has a forward() of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
    raise PartitionError(
        f"split() cuts models that do nothing but run their children one after the other, but {kind} {why}, "
        "and only its author knows what happens between its children. Either write one module for each stage "
        "yourself and pass them to Pipeline, or put the children into an nn.Sequential and split that"
    )


def _checked_places(model: nn.Module, names: Sequence[object]) -> list[Place]:
    """Where the stages after the first begin, in order."""
    places: list[tuple[str, Place]] = []
    faults: list[str] = []
    for name in names:
        place = _place(model, name)
        if isinstance(place, str):
            faults.append(place)
        elif isinstance(name, str):
            places.append((name, place))
    faults += _order_faults(places)
    faults += _container_faults(model, [place for _, place in places])
    if faults:
        raise PartitionError("\n".join(faults))
    return [place for _, place in places]


def _place(model: nn.Module, name: object) -> Place | str:
    """Where a stage with this first module begins, or what is wrong with the name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not isinstance(name, str) or name not in modules or not name:
        return _unknown(name, _names_to_cut_at(model))
    place: list[int] = []
    inside = ""
    for step in name.split("."):
        container = modules[inside]
        if not _runs_in_order(container):
            return (
                f"{name!r} is inside {inside!r}, a {type(container).__name__}, and only an nn.Sequential "
                f"without a forward() of its own can be cut: let a stage begin at {inside!r} or after it"
            )
        place.append(list(_children(container)).index(step))
        inside = f"{inside}.{step}" if inside else step
    while place and place[-1] == 0:
        place.pop()
    return tuple(place)


def _unknown(name: object, names: Sequence[str], *, there: bool = False) -> str:
    fault = f"there is no module {printable(repr(name))} in the model"
    if there:
        fault = f"no stage can begin at {name!r}, which is inside of a layer, or goes with what is before it"
    if close := get_close_matches(str(name), names):
        return f"{fault}: did you mean {' or '.join(map(repr, close))}?"
    return f"{fault}; stages can begin at {some(list(map(repr, names)))}"


def _names_to_cut_at(module: nn.Module, inside: str = "") -> list[str]:
    if not _runs_in_order(module):
        return []
    names = []
    for name, child in _children(module).items():
        names += [inside + name, *_names_to_cut_at(child, f"{inside}{name}.")]
    return names


def _order_faults(places: Sequence[tuple[str, Place]]) -> list[str]:
    faults = [
        f"{name!r} is the very first module, so the first stage would be empty: leave it out"
        for name, place in places
        if not place
    ]
    seen: dict[Place, str] = {}
    for name, place in places:
        if place in seen:
            both = "is named twice" if seen[place] == name else f"begins where {seen[place]!r} begins"
            faults.append(f"{name!r} {both}, so a stage would be empty: leave one out")
        seen.setdefault(place, name)
    seen.pop((), None)
    in_order = sorted(seen)
    if list(seen) != in_order:
        right = ", ".join(repr(seen[place]) for place in in_order)
        faults.append(f"names come in the order of the model: {right}")
    return faults


def _container_faults(model: nn.Module, places: Sequence[Place]) -> list[str]:
    """What containers that are cut would lose: only their children go on to live in the stages."""
    cut: dict[str, nn.Module] = {}
    for place in places:
        name, container = "", model
        for index in place:
            cut[name] = container
            child_name, container = list(_children(container).items())[index]
            name = f"{name}.{child_name}" if name else child_name
    faults = []
    for name, container in cut.items():
        called = f"the container {name!r}" if name else "the model itself"
        if any(vars(container).get(hooks) for hooks in _HOOKS):
            faults.append(f"{called} is cut and has hooks, which would never run: put them on its children")
        if _has_own_state(container):
            faults.append(
                f"{called} is cut and has parameters, buffers or other state of its own, which would belong "
                "to no stage: move them into one of its children"
            )
    return faults


def _has_own_state(container: nn.Module) -> bool:
    tensors = [*container.parameters(recurse=False), *container.buffers(recurse=False)]
    return bool(tensors) or type(container).get_extra_state is not nn.Module.get_extra_state
