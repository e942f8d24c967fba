"""Parameter names and `split` metadata of modules inside wrappers such as DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.ir.graph import StageGraph
from penstock.runtime.torch_internals.modules import WRAPPED_NAMES


def prefixes(module: nn.Module) -> dict[str, str]:
    """For the path of every submodule: the prefix of its tensor names, without the names of wrappers."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = {"": ""}
    for path in modules:
        if path:
            above, _, last = path.rpartition(".")
            of_ddp = last == "module" and isinstance(modules[above], DistributedDataParallel)
            found[path] = found[above] + ("" if last in WRAPPED_NAMES or of_ddp else f"{last}.")
    return found


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter; a parameter with two names is given twice."""
    for name, owner, own_name in owners(module):
        yield name, owner.get_parameter(own_name)


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """For every parameter: its name, the submodule that owns it, and its name there."""
    for path, prefix in prefixes(module).items():
        owner = module.get_submodule(path)
        for own_name, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + own_name, owner, own_name


def split_metadata(module: nn.Module, name: str) -> Any:
    """The attribute that `split` set on a stage, which may be wrapped since; None if there is none."""
    part: Any = module
    while part is not None:
        if name in vars(part):
            return vars(part)[name]
        children = dict(part.named_children())
        part = next((children[each] for each in ("module", *WRAPPED_NAMES) if each in children), None)
    return None


def split_graph(stages: Iterable[object]) -> StageGraph | None:
    """The stage graph that `split` found for the model of these stages; None for stages made otherwise."""
    found = (split_metadata(stage, "stage_graph") for stage in stages if isinstance(stage, nn.Module))
    return next((graph for graph in found if graph is not None), None)
