"""The containers of an `nn.Module`: its hooks, and copies of a module that have containers of their own."""

from __future__ import annotations

import copy

from torch import nn

_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]
_HOOKS = [name for name in _CONTAINERS if name.endswith("hooks")]


def has_hooks(module: nn.Module) -> bool:
    """Whether the module itself has hooks."""
    return any(vars(module).get(hooks) for hooks in _HOOKS)


def shallow_copy(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A copy of the class `cls` with the same children and attributes, whose children can be replaced."""
    copied = cls.__new__(cls)
    vars(copied).update(vars(module))
    vars(copied).update({name: copy.copy(vars(module)[name]) for name in _CONTAINERS})
    return copied
