"""What is behind wrappers such as DistributedDataParallel: names of parameters, and what `split` has noted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["named_parameters", "noted", "prefixes"]

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation checkpointing


def prefixes(module: nn.Module) -> dict[str, str]:
    """For the path of every part of a module: what names of its own tensors begin with, without wrappers."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = {"": ""}
    for path in modules:
        if path:
            above, _, last = path.rpartition(".")
            of_ddp = last == "module" and isinstance(modules[above], DistributedDataParallel)
            found[path] = found[above] + ("" if last in _WRAPPED or of_ddp else f"{last}.")
    return found


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter; one under two names comes twice."""
    for path, prefix in prefixes(module).items():
        for name, parameter in module.get_submodule(path).named_parameters(
            recurse=False, remove_duplicate=False
        ):
            yield prefix + name, parameter


def noted(module: nn.Module, name: str) -> Any:
    """What `split` has noted in a stage under this name, which may be wrapped since; None if nothing was."""
    part: Any = module
    while part is not None:
        if name in vars(part):
            return vars(part)[name]
        inside = (part._modules[each] for each in ("module", *_WRAPPED) if each in part._modules)  # noqa: SLF001
        part = next(inside, None)
    return None
