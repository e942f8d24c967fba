"""Splitting an `nn.Sequential`, with others nested in it, between any two modules that it runs.

    model = nn.Sequential(OrderedDict(embed=..., layers=nn.Sequential(a, b, c, d), head=...))
    split(model, at=["layers.1", "layers.3"])

    stage 0     embed   layers.0
    stage 1             layers.1  layers.2
    stage 2                                 layers.3    head

A tuple travels between stages as positional arguments, any other value as one argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.arguments import printable, some
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, parse_layout
from penstock.runtime.models.module_containers import has_hooks
from penstock.runtime.models.stage_starts import Start, order_problems, unknown_name


def split_sequential(
    model: nn.Module, at: Sequence[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    """The stages by number; without a name to split at, stage 0 is the model itself."""
    if layout is not None:
        _check_model(model)
        names: Sequence[str] = _names_from_layout(model, layout)
    else:
        names = list(at or ())
    if not names:
        return {0: model}
    _check_model(model)
    starts = _checked_starts(model, names)
    ends: list[Start | None] = [*starts, None]
    stages = [
        _SequentialStage(_children_between(model, start, end), training=model.training, last=end is None)
        for start, end in zip([(), *starts], ends)
    ]
    return dict(enumerate(stages))


class _SequentialStage(nn.Sequential):
    """A stage: the modules before the next stage's first module."""

    def __init__(self, children: OrderedDict[str, nn.Module], *, training: bool, last: bool) -> None:
        super().__init__(children)
        self.training = training  # of this container only: each child has its own
        self._is_last_stage = last

    def forward(self, *inputs: Any) -> Any:
        """Run the children in sequence; several arguments are the tuple that the previous stage returned."""
        value = inputs[0] if len(inputs) == 1 else inputs
        for child in self:
            value = child(value)
        # the next stage would receive (x,) as x; nested in another tuple, it receives (x,)
        return (value,) if not self._is_last_stage and type(value) is tuple and len(value) == 1 else value


def _children_between(container: nn.Module, start: Start, end: Start | None) -> OrderedDict[str, nn.Module]:
    """The children from `start` to before `end`; a child that is split becomes a new container."""
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (name, child) in enumerate(_children(container).items()):
        child_start = start[1:] if start[:1] == (index,) else ()
        child_end = end[1:] if end is not None and end[:1] == (index,) else None
        if (index,) < start[:1] or (end is not None and (index,) >= end[:1] and not child_end):
            continue
        if child_start or child_end:
            part = nn.Sequential(_children_between(child, child_start, child_end))
            part.training = child.training
            kept[name] = part
        else:
            kept[name] = child
    return kept


def _children(container: nn.Module) -> dict[str, nn.Module]:
    """The children by name; a module with two names appears twice, because it runs twice."""
    every = container.named_modules(remove_duplicate=False)
    return {name: module for name, module in every if name and "." not in name}


# --- by layout -------------------------------------------------------------------------------------


def _names_from_layout(model: nn.Module, layout: str | PipelineLayout) -> list[str]:
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
    stages = parse_layout(str(layout), len(layers), mtp_layers=0)
    empty = [number for number, stage in enumerate(stages) if stage.is_empty]
    problems = [f"stage {number} is empty, and here each stage needs a module: remove a |" for number in empty]
    if not place and not stages[0].layers:
        problems.append(f"stage 0 has only E, but nothing comes before the layers, {containers[0]!r}")
    if place == len(names) - 1 and not stages[-1].layers:
        problems.append(f"the last stage has only L, but nothing comes after the layers, {containers[0]!r}")
    if problems:
        raise PartitionError("\n".join(problems))
    return [layers[stage.layers[0]] if stage.layers else names[place + 1] for stage in stages[1:]]


# --- checks ----------------------------------------------------------------------------------------


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module only runs its children in sequence."""
    own_forward = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return isinstance(module, nn.Sequential) and not own_forward


def _check_model(model: nn.Module) -> None:
    if _is_plain_sequential(model):
        return
    kind = printable(type(model).__name__)
    why = "overrides forward()" if isinstance(model, nn.Sequential) else "is not an nn.Sequential"
    raise PartitionError(
        f"split() splits models that only run their children in sequence, but {kind} {why}, so split() cannot "
        "know what happens between its children. Trace it with torch.fx.symbolic_trace and split the result, "
        "write one module for each stage and pass them to Pipeline, or put the children into an nn.Sequential"
    )


def _checked_starts(model: nn.Module, names: Sequence[object]) -> list[Start]:
    """Where the stages after the first begin, in order."""
    starts: list[tuple[str, Start]] = []
    problems: list[str] = []
    for name in names:
        start = _start(model, name)
        if isinstance(start, str):
            problems.append(start)
        elif isinstance(name, str):
            starts.append((name, start))
    problems += order_problems(starts)
    problems += _container_problems(model, [start for _, start in starts])
    if problems:
        raise PartitionError("\n".join(problems))
    return [start for _, start in starts]


def _start(model: nn.Module, name: object) -> Start | str:
    """Where a stage with this first module begins, or what is wrong with the name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not isinstance(name, str) or name not in modules or not name:
        return unknown_name(name, _valid_names(model))
    start: list[int] = []
    path = ""
    for step in name.split("."):
        container = modules[path]
        if not _is_plain_sequential(container):
            return (
                f"{name!r} is inside {path!r}, a {type(container).__name__}, and only an nn.Sequential that "
                f"does not override forward() can be split: begin a stage at {path!r} or after it"
            )
        start.append(list(_children(container)).index(step))
        path = f"{path}.{step}" if path else step
    while start and start[-1] == 0:
        start.pop()
    return tuple(start)


def _valid_names(module: nn.Module, prefix: str = "") -> list[str]:
    if not _is_plain_sequential(module):
        return []
    names = []
    for name, child in _children(module).items():
        names += [prefix + name, *_valid_names(child, f"{prefix}{name}.")]
    return names


def _container_problems(model: nn.Module, starts: Sequence[Start]) -> list[str]:
    """What containers that are split would lose: only their children become parts of the stages."""
    containers: dict[str, nn.Module] = {}
    for start in starts:
        name, container = "", model
        for index in start:
            containers[name] = container
            child_name, container = list(_children(container).items())[index]
            name = f"{name}.{child_name}" if name else child_name
    problems = []
    for name, container in containers.items():
        what = f"the container {name!r}" if name else "the model itself"
        if has_hooks(container):
            problems.append(f"{what} is split and has hooks, which would never run: put them on its children")
        if _has_own_state(container):
            problems.append(
                f"{what} is split and has parameters, buffers or other state of its own, which would belong to "
                "no stage: move them into one of its children"
            )
    return problems


def _has_own_state(container: nn.Module) -> bool:
    tensors = [*container.parameters(recurse=False), *container.buffers(recurse=False)]
    return bool(tensors) or type(container).get_extra_state is not nn.Module.get_extra_state
